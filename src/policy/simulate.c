/* Predicts the duration of an iteration under a plan, by simulating the resources: one compute stream, one link in each
 * direction, the update workers as one resource, and the files as one resource. Called by plan.c for every candidate,
 * and by tracer/tracer.c (gmi_plan_simulate()) when times were measured anew.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Rules:
 * - A stage starts when the stage before it has ended, its chunks have arrived, and the frames that it takes itself
 *   (for chunks that it overwrites, and for growth of non-model memory) are free.
 * - A fetch starts when the link has done the fetches before it, a frame is free, and the bytes on the host are
 *   current. Frames are taken in the order in which they were given back. The frame of a clean chunk is given back when
 *   the stage ends, that of a dirty chunk when the write-back ends, that of non-model memory when the op ends.
 * - A host piece is ready when its op has ended, its chunks are written back, and the earlier pieces that use one of
 *   its chunks are done. Of the ready pieces, the workers take the one whose shared chunks an op uses next soonest,
 *   then the lowest index. If none is ready, they wait for the first that becomes ready. The chunks of a piece are
 *   current host_delay_ns after its work, because each worker finishes other work first. A piece is done before it is
 *   submitted again in the next iteration. A piece that is computed ahead is submitted when its ahead_op has ended.
 *   Until its own op has, the workers take it behind all others; of several, the one submitted first.
 * - A host piece in two passes is done with its shared chunks after the first one. The second one comes behind all
 *   pieces whose next use is known, and before those that are computed ahead; of several, the one that was begun last.
 *   If the first one is computed ahead, the second one waits for the end of the piece's op. It is not computed ahead
 *   while the second one of the iteration before is not done.
 * - If the host lacks room for all states, the last pieces of an iteration are streamed: their states are read from
 *   files before the update and written after it, a few pieces at a time. They run after the other host
 *   pieces, in order; an update waits for its read and for the write-backs of its chunks.
 * - A gather starts when its group's link has done the gathers before it, its frame is free and this rank's slice has
 *   been copied, behind the fetches that were issued before it; a sum, when its op has ended and the group has done the
 *   sums before it. Behind a sum, the slice goes to the host over the link of write-backs. Parts of slices that are on
 *   the device need no link. Other ranks are as fast as this one.
 * - A device piece is a stage of the compute stream, after its op. If pieces run apart (input->pieces_apart), it
 *   instead starts when its op and the device piece before it have ended, and the next use of its chunks waits for it.
 * - The host issues work ahead of the device at no cost, but waits for the compute stream at the begin of an iteration,
 *   where users read the loss. So nothing that an iteration issues starts before its begin. Work in flight continues.
 *
 * One pass in program order suffices, because everything waits only for earlier things. One thing depends on later
 * events: which piece the workers take. Therefore fetches, and the pieces that update the fetched chunks, are
 * evaluated only when a stage waits for them (fetching_t). Every piece submitted later is ready only after
 * that stage and changes nothing before it. (If device pieces run apart, this is an approximation.) */
#include <stdlib.h>
#include <string.h>

#include "policy/model.h"

#define MAX_ITERATIONS 6
#define NONE UINT32_MAX
#define NOT_SUBMITTED UINT64_MAX
#define AHEAD (UINT64_C(1) << 63)  /* key of pieces that are computed ahead: behind all others */
#define STATES (UINT64_C(1) << 62) /* keys of second passes are above, from AHEAD - 2 down; known next uses below */

/* Free frames in the order in which they were given back, oldest first, grouped by the time at which they become
 * ready. Invariant: free_frames of machine_t is the sum of the counts. */
typedef struct frame_run {
  uint64_t ready_ns;
  uint64_t count;
} frame_run_t;

/* Binary min-heap of pieces, by key, then by index. */
typedef struct waiting {
  uint64_t key;
  uint32_t piece;
} waiting_t;
typedef struct heap {
  waiting_t *items; /* [piece_count + 1] */
  uint32_t count;
} heap_t;

/* Fetches that are issued but that no stage has waited for. They are in order of need, so they are evaluated in that
 * order; those in front have been evaluated already for a gather behind them. */
typedef struct fetching {
  uint64_t *start_ns; /* [fetches] when an issued fetch gets its frame; once it is evaluated, when it is done */
  uint32_t first;     /* index of the first one in the plan's fetches */
  uint32_t count, evaluated;
  uint64_t issued_total, evaluated_total; /* of all iterations */
} fetching_t;

/* Gathers and sums of the iteration. */
typedef struct groups {
  uint32_t issued, evaluated, arrived; /* gathers issued, evaluated, waited for by their op */
  uint32_t sum;                        /* sums issued */
  uint64_t *start_ns;                  /* [gather_count] as of fetches */
  uint64_t *behind;                    /* [gather_count] fetching.issued_total when it was issued */
  uint8_t *here;                       /* [gather_count + sum_count] bit per part: it is on the device */
  uint64_t (*host_ns)[GMI_PLAN_PARTS]; /* [gather_count] host_ready_ns of each part when it was issued */
  uint8_t *taken;                      /* [gather_count] bit per part: a piece had it then */
  uint64_t *updated_ns;                /* [chunk_count] when the last host piece of the chunk was done */
  uint64_t *came_ns;                   /* [chunk_count] when the chunk's last fetch was done */
  uint64_t *op_end_ns;                 /* [op_count] in this iteration */
  uint64_t *sum_ready_ns;              /* [chunk_count], if there are sums: when the sum that is in the chunk is done */
  uint64_t *gather_ns, *sum_ns;        /* [group_count] when each link becomes free */
} groups_t;

/* State of the simulation; times count from the begin of the first iteration. Invariants: a piece is in at most one
 * of coming and ready; owed_ns is the sum of host_ns over submitted pieces that are not done; fetching.count is at
 * most the number of fetches of the plan. */
typedef struct machine {
  const gmi_facts_t *facts;
  const gmi_plan_t *plan;
  struct {
    frame_run_t *ring;
    uint64_t capacity, first, count;
  } runs;
  uint64_t free_frames;
  uint64_t *host_ready_ns; /* [chunk_count] when the host copy is current, not counting pieces that are not done */
  fetching_t fetching;
  groups_t groups;
  /* submitted pieces that are not blocked. coming: by the time at which they become ready; ready: those seen to be
   * ready, by next use */
  heap_t coming, ready;
  /* [piece_count] NOT_SUBMITTED unless submitted and not done; while the piece is blocked, the maximum known so far */
  uint64_t *ready_ns;
  uint64_t *next_use; /* [piece_count] of a submitted piece: the op of its next use, counted over all iterations */
  uint32_t *blocked;  /* [piece_count] of a submitted piece: the earlier pieces it waits for, counted once per chunk */
  /* [chunk_count] the last submitted piece that uses the chunk and is not done, as an index into piece_chunks; NONE */
  uint32_t *last_taker;
  uint32_t *next_taker; /* [piece_chunks] of a submitted piece: the piece that uses the chunk next; NONE */
  uint64_t ahead_count; /* pieces submitted to be computed ahead so far */
  struct {
    uint8_t *had_first;    /* [piece_count] 1: its second pass is left, and waits for its op if it is not taken over */
    uint8_t *too_late;     /* [piece_count] 1: it could not be computed ahead this time */
    uint64_t states_count; /* first passes so far */
  } passes;
  uint64_t owed_ns;     /* work of submitted pieces that are not done */
  uint64_t ops_before;  /* ops of all iterations before this one */
  uint64_t *updated_ns; /* [chunk_count] when the chunk's last device piece is done; NULL unless pieces run apart */
  uint32_t *fresh;      /* [op_count] chunks that get a frame without a fetch, because the op overwrites them */
  /* [piece_count] state chunks that are read from and written to files for this piece; 0: the piece is not streamed */
  uint32_t *streamed;
  struct {
    uint32_t *pieces; /* [piece_count] the streamed pieces of this iteration */
    uint64_t *ns;     /* [piece_count] when each was submitted; later, when each was done */
    uint32_t count;
  } queue;
  uint64_t file_chunks; /* read from files per iteration; as many are written */
  uint64_t begin_ns;    /* begin of this iteration */
  struct {              /* when each resource becomes free */
    uint64_t stream_ns, device_update_ns, fetch_ns, evict_ns, update_ns, file_ns;
  } idle;
  uint64_t worst_stall_ns, stall_ns; /* the longest stall of an op in this iteration; the stall of the current op */
  uint32_t worst_op;
  bool starved; /* a frame was needed and none was free: the plan was not made from this input */
} machine_t;

/* Appends count free frames that become ready at ready_ns. */
static void give_frames(machine_t *m, uint64_t ready_ns, uint64_t count) {
  if (count == 0) return;
  m->free_frames += count;
  if (m->runs.count > 0) {
    frame_run_t *last = &m->runs.ring[(m->runs.first + m->runs.count - 1) % m->runs.capacity];
    if (last->ready_ns == ready_ns) {
      last->count += count;
      return;
    }
  }
  /* merge the two oldest groups: frames that waited this long are ready anyway */
  if (m->runs.count == m->runs.capacity) {
    frame_run_t *oldest = &m->runs.ring[m->runs.first], *second = &m->runs.ring[(m->runs.first + 1) % m->runs.capacity];
    second->count += oldest->count;
    if (second->ready_ns < oldest->ready_ns) second->ready_ns = oldest->ready_ns;
    m->runs.first = (m->runs.first + 1) % m->runs.capacity;
    m->runs.count--;
  }
  m->runs.ring[(m->runs.first + m->runs.count++) % m->runs.capacity] = (frame_run_t){ ready_ns, count };
}

/* Takes the oldest count frames; returns when the last of them is ready. */
static uint64_t take_frames(machine_t *m, uint64_t count) {
  uint64_t ready_ns = 0;
  if (count > m->free_frames) {
    m->starved = true;
    return 0;
  }
  m->free_frames -= count;
  while (count > 0) {
    frame_run_t *run = &m->runs.ring[m->runs.first];
    uint64_t part = count < run->count ? count : run->count;
    if (ready_ns < run->ready_ns) ready_ns = run->ready_ns;
    run->count -= part;
    count -= part;
    if (run->count == 0) {
      m->runs.first = (m->runs.first + 1) % m->runs.capacity;
      m->runs.count--;
    }
  }
  return ready_ns;
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

static bool goes_before(waiting_t a, waiting_t b) { return a.key != b.key ? a.key < b.key : a.piece < b.piece; }

static void push(heap_t *heap, uint64_t key, uint32_t piece) {
  waiting_t item = { key, piece };
  uint32_t at = heap->count++;
  for (; at > 0 && goes_before(item, heap->items[(at - 1) / 2]); at = (at - 1) / 2)
    heap->items[at] = heap->items[(at - 1) / 2];
  heap->items[at] = item;
}

static uint32_t pop(heap_t *heap) {
  uint32_t piece = heap->items[0].piece, at = 0;
  waiting_t item = heap->items[--heap->count];
  for (uint32_t child = 1; child < heap->count; child = 2 * at + 1) {
    if (child + 1 < heap->count && goes_before(heap->items[child + 1], heap->items[child])) child++;
    if (!goes_before(heap->items[child], item)) break;
    heap->items[at] = heap->items[child];
    at = child;
  }
  heap->items[at] = item;
  return piece;
}

static bool is_taken_over(const machine_t *m, uint32_t piece) { return m->next_use[piece] < AHEAD; }

/* What is computed ahead is not wanted soon, before it is taken over. */
static bool in_two_passes(const machine_t *m, uint32_t piece) {
  return m->plan->piece_ahead[piece] == GMI_AHEAD_RESULTS ||
         (m->plan->piece_passes[piece] && m->next_use[piece] < STATES);
}
static uint64_t ready_key(machine_t *m, uint32_t piece) {
  return m->passes.had_first[piece] ? AHEAD - 2 - m->passes.states_count++ : m->next_use[piece];
}

/* Runs the piece that the workers take next if it starts before before_ns. Returns false if there is no such piece.
 * The piece is chosen among all pieces that are ready at its start, hence the move from coming to ready. */
static bool run_piece(machine_t *m, uint64_t before_ns) {
  const gmi_plan_input_t *input = m->facts->input;
  if (m->ready.count == 0 && m->coming.count == 0) return false;
  uint64_t start_ns = m->ready.count > 0 ? m->idle.update_ns : later(m->idle.update_ns, m->coming.items[0].key);
  if (start_ns >= before_ns) return false;
  while (m->coming.count > 0 && m->coming.items[0].key <= start_ns) {
    uint32_t piece = pop(&m->coming);
    push(&m->ready, ready_key(m, piece), piece);
  }
  uint32_t piece = pop(&m->ready), from = input->pieces[piece].chunk_first, to = gmi_plan_piece_end(input, piece);
  uint64_t work_ns = input->pieces[piece].host_ns;
  if (m->passes.had_first[piece]) {
    work_ns = input->pieces[piece].state_ns;
    from += input->pieces[piece].shared_count;
    m->passes.had_first[piece] = 0;
  } else if (in_two_passes(m, piece)) {
    work_ns = input->pieces[piece].result_ns;
    m->owed_ns += work_ns + input->pieces[piece].state_ns - input->pieces[piece].host_ns;
    to = from + input->pieces[piece].shared_count;
    m->passes.had_first[piece] = 1;
    if (is_taken_over(m, piece)) push(&m->ready, ready_key(m, piece), piece);
  }
  m->idle.update_ns = start_ns + work_ns;
  m->owed_ns -= work_ns;
  if (!m->passes.had_first[piece]) m->ready_ns[piece] = NOT_SUBMITTED;
  uint64_t done_ns = m->idle.update_ns + input->host_delay_ns;
  for (uint32_t i = from; i < to; i++) {
    uint32_t chunk = input->piece_chunks[i], next = m->next_taker[i];
    m->host_ready_ns[chunk] = later(m->host_ready_ns[chunk], done_ns);
    m->groups.updated_ns[chunk] = done_ns;
    if (next == NONE) {
      m->last_taker[chunk] = NONE;
    } else {
      m->ready_ns[next] = later(m->ready_ns[next], done_ns);
      if (--m->blocked[next] == 0) push(&m->coming, m->ready_ns[next], next);
    }
  }
  return true;
}

/* Submits a host piece at the end of its op, or of its ahead_op. Chains it behind the last submitted piece of each of
 * its chunks; it is blocked until those are done. */
static void submit(machine_t *m, uint32_t piece, uint64_t use) {
  const gmi_plan_input_t *input = m->facts->input;
  while (m->ready_ns[piece] != NOT_SUBMITTED) run_piece(m, UINT64_MAX);
  uint64_t ready_ns = m->idle.stream_ns;
  for (uint32_t i = input->pieces[piece].chunk_first; i < gmi_plan_piece_end(input, piece); i++) {
    uint32_t chunk = input->piece_chunks[i], last = m->last_taker[chunk];
    ready_ns = later(ready_ns, m->host_ready_ns[chunk]);
    m->blocked[piece] += last != NONE;
    if (last != NONE) m->next_taker[last] = piece;
    m->next_taker[i] = NONE;
    m->last_taker[chunk] = i;
  }
  m->ready_ns[piece] = ready_ns;
  m->next_use[piece] = use;
  m->owed_ns += input->pieces[piece].host_ns;
  if (m->blocked[piece] == 0) push(&m->coming, ready_ns, piece);
}

/* Is the piece submitted before its op has ended? */
static bool is_ahead(const machine_t *m, uint32_t piece) {
  return m->plan->piece_ahead[piece] &&
         m->facts->input->pieces[piece].ahead_op < m->facts->input->pieces[piece].after_op;
}

/* Submits the pieces that are computed ahead from the end of op, but first passes only where the second one of the step
 * before is done: its gradients have the spare slot. */
static void submit_ahead(machine_t *m, uint32_t op) {
  for (uint32_t i = m->facts->op_ahead_first[op]; i < m->facts->op_ahead_first[op + 1]; i++) {
    const uint32_t piece = m->facts->op_ahead[i];
    if (!is_ahead(m, piece)) continue;
    m->passes.too_late[piece] = m->plan->piece_ahead[piece] == GMI_AHEAD_RESULTS && m->ready_ns[piece] != NOT_SUBMITTED;
    if (!m->passes.too_late[piece]) submit(m, piece, AHEAD + m->ahead_count++);
  }
}

/* Submits the host pieces of op, which has ended. Of those computed ahead, what is left is urgent from now on. */
static void submit_pieces(machine_t *m, uint32_t op) {
  bool changed = false;
  for (uint32_t i = m->facts->op_piece_first[op]; i < m->facts->op_piece_first[op + 1]; i++) {
    uint32_t piece = m->facts->op_pieces_by_use[i], next = m->facts->piece_use[piece];
    const uint64_t use = next == NONE ? AHEAD - 1 : m->ops_before + next;
    if (m->plan->piece_on_device[piece]) continue;
    if (is_ahead(m, piece) && !m->passes.too_late[piece]) {
      m->next_use[piece] = use;
      if (m->passes.had_first[piece]) push(&m->coming, m->idle.stream_ns, piece);
      changed = true;
    } else if (m->streamed[piece] == 0) {
      submit(m, piece, use);
    } else {
      m->queue.pieces[m->queue.count] = piece;
      m->queue.ns[m->queue.count++] = m->idle.stream_ns;
    }
  }
  const uint32_t count = changed ? m->ready.count : 0;
  if (changed) m->ready.count = 0; /* in place: no item is overwritten before it is read */
  for (uint32_t i = 0; i < count; i++) {
    const waiting_t item = m->ready.items[i];
    push(&m->ready, m->passes.had_first[item.piece] ? item.key : m->next_use[item.piece], item.piece);
  }
}

/* Issues the fetches of the current op that belong to piece: each takes a frame. They are evaluated later, by
 * arrived_for(). */
static void issue_fetches(machine_t *m, uint32_t *next, uint32_t end, uint32_t piece) {
  for (; *next < end && m->plan->fetches[*next].piece == piece; ++*next) {
    m->fetching.start_ns[*next] = later(m->begin_ns, take_frames(m, 1));
    m->fetching.issued_total++;
    /* more fetches are outstanding than the plan has: one of them is for no stage */
    if (m->fetching.count++ == m->plan->fetch_first[m->plan->op_count]) m->starved = true;
  }
}

/* Returns when fetch f is done if the fetch before it is done at fetch_ns. */
static uint64_t fetched(const machine_t *m, uint32_t f, uint64_t fetch_ns) {
  uint64_t host_ready_ns = m->host_ready_ns[m->plan->fetches[f].chunk];
  return later(later(fetch_ns, m->fetching.start_ns[f]), host_ready_ns) + m->facts->input->fetch_ns;
}

/* Evaluates the first issued gather that has not been, after the pieces that still update its slice. */
static void evaluate_gather(machine_t *m) {
  const gmi_plan_input_t *input = m->facts->input;
  const uint32_t index = m->groups.evaluated++;
  const gmi_plan_collective_t *g = &input->groups.gathers[index];
  uint64_t own_ns = m->groups.start_ns[index];
  for (uint32_t k = 0; k < g->part_count; k++) {
    while (m->last_taker[g->parts[k]] != NONE) run_piece(m, UINT64_MAX);
    if (m->groups.here[index] >> k & 1) {
      own_ns = later(own_ns, m->groups.came_ns[g->parts[k]]);
      if (m->updated_ns) own_ns = later(own_ns, m->updated_ns[g->parts[k]]);
      continue;
    }
    uint64_t ready_ns = m->groups.host_ns[index][k]; /* not that of sums behind the gather */
    if (m->groups.taken[index] >> k & 1) ready_ns = later(ready_ns, m->groups.updated_ns[g->parts[k]]);
    own_ns = m->idle.fetch_ns =
        later(later(m->idle.fetch_ns, own_ns), ready_ns) + gmi_plan_part_ns(input, input->fetch_ns, g->part_bytes[k]);
  }
  uint64_t *link_ns = &m->groups.gather_ns[g->group];
  m->groups.start_ns[index] = *link_ns = later(*link_ns, own_ns) + input->groups.links[g->group].gather_ns;
}

/* Evaluates the first outstanding fetch that has not been, after the gathers whose slices were queued on the link
 * before it, and after the pieces that still update its chunk. */
static void evaluate_fetch(machine_t *m) {
  const uint32_t fetches = m->plan->fetch_first[m->plan->op_count];
  uint32_t f = m->fetching.first + m->fetching.evaluated;
  if (f >= fetches) f -= fetches;
  while (m->groups.evaluated < m->groups.issued && m->groups.behind[m->groups.evaluated] <= m->fetching.evaluated_total)
    evaluate_gather(m);
  while (m->last_taker[m->plan->fetches[f].chunk] != NONE) run_piece(m, UINT64_MAX);
  m->fetching.start_ns[f] = m->idle.fetch_ns = fetched(m, f, m->idle.fetch_ns);
  m->groups.came_ns[m->plan->fetches[f].chunk] = m->idle.fetch_ns;
  m->fetching.evaluated++;
  m->fetching.evaluated_total++;
}

/* Queues the gathers that belong before op. */
static void issue_gathers(machine_t *m, uint32_t op) {
  const gmi_plan_groups_t *groups = &m->facts->input->groups;
  for (; m->groups.issued < groups->gather_count && groups->gathers[m->groups.issued].op == op; m->groups.issued++) {
    uint32_t frame_op = groups->gathers[m->groups.issued].frame_op;
    uint64_t free_ns = frame_op == GMI_NO_OP ? m->idle.stream_ns : m->groups.op_end_ns[frame_op];
    m->groups.start_ns[m->groups.issued] = later(m->begin_ns, free_ns);
    m->groups.behind[m->groups.issued] = m->fetching.issued_total;
    m->groups.taken[m->groups.issued] = 0;
    for (uint32_t k = 0; k < groups->gathers[m->groups.issued].part_count; k++) {
      uint32_t part = groups->gathers[m->groups.issued].parts[k];
      m->groups.host_ns[m->groups.issued][k] = m->host_ready_ns[part];
      m->groups.taken[m->groups.issued] |= (uint8_t)((m->last_taker[part] != NONE) << k);
    }
  }
}

/* Returns when the gathers for op are done. Between its issue and its op nothing changes a gather's slice, so that it
 * can be evaluated late: an update makes what was gathered before it leave. */
static uint64_t gathered_for(machine_t *m, uint32_t op) {
  const gmi_plan_groups_t *groups = &m->facts->input->groups;
  uint64_t ready_ns = 0;
  for (; m->groups.arrived < m->groups.issued && groups->gathers[m->groups.arrived].use_op == op; m->groups.arrived++) {
    while (m->groups.evaluated <= m->groups.arrived) {
      const bool waits = groups->gathers[m->groups.evaluated].part_count > 0; /* for fetches: it has a slice */
      while (waits && m->fetching.evaluated_total < m->groups.behind[m->groups.evaluated] &&
             m->fetching.evaluated < m->fetching.count)
        evaluate_fetch(m);
      if (m->groups.evaluated <= m->groups.arrived) evaluate_gather(m);
    }
    ready_ns = later(ready_ns, m->groups.start_ns[m->groups.arrived]);
  }
  return ready_ns;
}

/* Evaluates the outstanding fetches for this stage, after the pieces that still update their chunks; returns when the
 * last of them is done. */
static uint64_t arrived_for(machine_t *m, uint32_t op, uint32_t piece) {
  uint64_t ready_ns = 0;
  for (; m->fetching.count > 0; m->fetching.count--) {
    const gmi_plan_move_t *move = &m->plan->fetches[m->fetching.first];
    if (move->use_op != op || move->use_piece != piece) break;
    if (m->fetching.evaluated == 0) evaluate_fetch(m);
    ready_ns = m->fetching.start_ns[m->fetching.first];
    m->fetching.evaluated--;
    if (++m->fetching.first == m->plan->fetch_first[m->plan->op_count]) m->fetching.first = 0;
  }
  return ready_ns;
}

/* Issues the evictions of the current op that belong to piece: a dirty chunk occupies the link and gives its frame
 * back after the write-back, a clean one gives it back at once. */
static void issue_evicts(machine_t *m, uint32_t *next, uint32_t end, uint32_t piece) {
  const gmi_plan_input_t *input = m->facts->input;
  for (; *next < end && m->plan->evicts[*next].piece == piece; ++*next) {
    const gmi_plan_move_t *move = &m->plan->evicts[*next];
    uint64_t free_ns = later(m->idle.stream_ns, m->updated_ns ? m->updated_ns[move->chunk] : 0);
    if ((move->flags & GMI_EVICT_DIRTY) != 0) {
      m->idle.evict_ns = later(m->idle.evict_ns, free_ns) + input->evict_ns;
      m->host_ready_ns[move->chunk] = m->idle.evict_ns;
      give_frames(m, m->idle.evict_ns, 1);
    } else {
      give_frames(m, free_ns, 1);
    }
  }
}

/* Advances the compute stream by a stage that can start at ready_ns; the wait counts as a stall. */
static void run_stage(machine_t *m, uint64_t ready_ns, uint64_t duration_ns) {
  if (ready_ns > m->idle.stream_ns) {
    m->stall_ns += ready_ns - m->idle.stream_ns;
    m->idle.stream_ns = ready_ns;
  }
  m->idle.stream_ns += duration_ns;
}

/* ---- groups */
/* Queues the sums behind op, which has ended, and the copies of this rank's slices. */
static void issue_sums(machine_t *m, uint32_t op) {
  const gmi_plan_input_t *input = m->facts->input;
  for (; m->groups.sum < input->groups.sum_count && input->groups.sums[m->groups.sum].op == op; m->groups.sum++) {
    const gmi_plan_collective_t *s = &input->groups.sums[m->groups.sum];
    uint64_t *link_ns = &m->groups.sum_ns[s->group];
    *link_ns = later(*link_ns, m->idle.stream_ns) + input->groups.links[s->group].sum_ns;
    for (uint32_t k = 0; k < s->part_count; k++) {
      m->groups.sum_ready_ns[s->parts[k]] = later(m->groups.sum_ready_ns[s->parts[k]], *link_ns);
      if (m->groups.here[input->groups.gather_count + m->groups.sum] >> k & 1) continue;
      m->idle.evict_ns = later(m->idle.evict_ns, *link_ns) + gmi_plan_part_ns(input, input->evict_ns, s->part_bytes[k]);
      m->host_ready_ns[s->parts[k]] = later(m->host_ready_ns[s->parts[k]], m->idle.evict_ns);
    }
  }
}

/* Returns when the sums are done that a device piece updates from. */
static uint64_t summed_for(const machine_t *m, uint32_t piece) {
  const gmi_plan_input_t *input = m->facts->input;
  uint64_t ready_ns = 0;
  for (uint32_t i = input->pieces[piece].chunk_first;
       input->groups.sum_count > 0 && i < gmi_plan_piece_end(input, piece); i++)
    ready_ns = later(ready_ns, m->groups.sum_ready_ns[input->piece_chunks[i]]);
  return ready_ns;
}

/* Notes which parts of the collectives behind the last one noted, up to those of op, are on the device. */
static void note_parts(const gmi_plan_collective_t *all, uint32_t count, uint32_t *next, uint32_t op,
                       const uint8_t *resident, uint8_t *here) {
  for (; *next < count && all[*next].op == op; ++*next)
    for (uint32_t k = 0; k < all[*next].part_count; k++)
      here[*next] |= (uint8_t)((resident[all[*next].parts[k]] != 0) << k);
}

/* Adds up what the groups move. Copies of slices are work of the links between host and device. */
static void count_traffic(const machine_t *m, gmi_plan_t *plan) {
  const gmi_plan_input_t *input = m->facts->input;
  if (input->groups.group_count > 0) memset(plan->traffic, 0, input->groups.group_count * sizeof *plan->traffic);
  for (uint32_t i = 0; i < input->groups.gather_count + input->groups.sum_count; i++) {
    const bool sum = i >= input->groups.gather_count;
    const gmi_plan_collective_t *c =
        sum ? &input->groups.sums[i - input->groups.gather_count] : &input->groups.gathers[i];
    gmi_plan_traffic_t *traffic = &plan->traffic[c->group];
    *(sum ? &traffic->summed : &traffic->gathered) += c->bytes;
    for (uint32_t k = 0; k < c->part_count; k++) {
      const bool here = m->groups.here[i] >> k & 1;
      if (sum) traffic->stored += c->part_bytes[k];
      else if (!here) traffic->fetched += c->part_bytes[k];
      if (here) continue;
      *(sum ? &plan->evict_busy_ns : &plan->fetch_busy_ns) +=
          gmi_plan_part_ns(input, sum ? input->evict_ns : input->fetch_ns, c->part_bytes[k]);
    }
  }
  plan->gather_busy_ns = gmi_links_busy_ns(input, input->groups.gathers, input->groups.gather_count, false);
  plan->sum_busy_ns = gmi_links_busy_ns(input, input->groups.sums, input->groups.sum_count, true);
}

static uint64_t latest_of(const uint64_t *ns, uint32_t count) {
  uint64_t latest_ns = 0;
  for (uint32_t i = 0; i < count; i++) latest_ns = later(latest_ns, ns[i]);
  return latest_ns;
}

/* Runs a device piece: as a stage of the compute stream, or on its own stream after its op if pieces run apart. */
static void update_on_device(machine_t *m, uint32_t piece) {
  const gmi_plan_input_t *input = m->facts->input;
  uint64_t ready_ns = later(arrived_for(m, input->pieces[piece].after_op, piece), summed_for(m, piece));
  if (!m->updated_ns) {
    run_stage(m, ready_ns, input->pieces[piece].device_ns);
    return;
  }
  m->idle.device_update_ns =
      later(later(m->idle.device_update_ns, m->idle.stream_ns), ready_ns) + input->pieces[piece].device_ns;
  for (uint32_t i = input->pieces[piece].chunk_first; i < gmi_plan_piece_end(input, piece); i++)
    m->updated_ns[input->piece_chunks[i]] = m->idle.device_update_ns;
}

/* Returns when the device pieces that update the op's chunks are done; 0 unless pieces run apart. */
static uint64_t updated_for(const machine_t *m, uint32_t op) {
  const gmi_plan_input_t *input = m->facts->input;
  uint64_t ready_ns = 0;
  for (uint32_t x = input->ops[op].access_first; m->updated_ns && x < input->ops[op + 1].access_first; x++)
    ready_ns = later(ready_ns, m->updated_ns[input->accesses[x].chunk]);
  return ready_ns;
}

/* Runs a streamed piece whose states have been read at idle.file_ns. */
static void update_read(machine_t *m, uint32_t piece) {
  const gmi_plan_input_t *input = m->facts->input;
  uint32_t first = input->pieces[piece].chunk_first, end = gmi_plan_piece_end(input, piece);
  uint64_t start_ns = later(m->idle.update_ns, m->idle.file_ns);
  for (uint32_t i = first; i < end; i++) start_ns = later(start_ns, m->host_ready_ns[input->piece_chunks[i]]);
  m->idle.update_ns = start_ns + input->pieces[piece].host_ns;
  for (uint32_t i = first; i < end; i++) m->host_ready_ns[input->piece_chunks[i]] = m->idle.update_ns;
}

/* Runs the streamed pieces of the iteration, after all other host pieces. At most ahead pieces are in progress, so
 * the write of a piece follows the read of the piece ahead positions later. */
static void update_streamed(machine_t *m) {
  const gmi_plan_input_t *input = m->facts->input;
  uint32_t ahead = input->host_pieces_ahead > 0 ? input->host_pieces_ahead : 1;
  while (m->queue.count > 0 && run_piece(m, UINT64_MAX)) continue;
  for (uint32_t i = 0; i < m->queue.count + ahead; i++) {
    if (i < m->queue.count) {
      m->idle.file_ns = later(m->idle.file_ns, m->queue.ns[i]) + m->streamed[m->queue.pieces[i]] * input->file_read_ns;
      update_read(m, m->queue.pieces[i]);
      m->queue.ns[i] = m->idle.update_ns;
    }
    if (i >= ahead && i - ahead < m->queue.count)
      m->idle.file_ns = later(m->idle.file_ns, m->queue.ns[i - ahead]) +
                        m->streamed[m->queue.pieces[i - ahead]] * input->file_write_ns;
  }
  m->queue.count = 0;
}

/* Finds the states that neither stay on the device nor fit on the host beside the shared chunks and the slots of the
 * pieces in progress. They are assigned to host pieces from the last one backwards, which become streamed. The rest,
 * states that come and go for device pieces, counts only as work of the files. */
static void find_streamed(machine_t *m, uint8_t *seen) {
  const gmi_plan_input_t *input = m->facts->input;
  uint64_t states = 0, shared = 0, largest = 0;
  memset(seen, 0, input->chunk_count);
  for (uint32_t p = 0; p < input->piece_count; p++) {
    uint64_t own = 0;
    for (uint32_t i = input->pieces[p].chunk_first; i < gmi_plan_piece_end(input, p); i++) {
      bool state = i >= input->pieces[p].chunk_first + input->pieces[p].shared_count;
      uint32_t chunk = input->piece_chunks[i];
      own += state;
      if (seen[chunk] || (state && m->plan->stays[chunk])) continue;
      seen[chunk] = 1;
      states += state;
      shared += !state;
    }
    if (own > largest) largest = own;
  }
  uint64_t room = input->host_slots > shared ? input->host_slots - shared : 0;
  if (input->host_slots == 0 || states <= room) return;
  uint64_t ring = largest * input->host_pieces_ahead; /* slots of the pieces in progress */
  room = room > ring ? room - ring : 0;
  uint64_t left = states - room;
  m->file_chunks = left;
  for (uint32_t p = input->piece_count; p-- > 0 && left > 0;) {
    if (m->plan->piece_on_device[p]) continue;
    uint64_t own = gmi_plan_piece_end(input, p) - input->pieces[p].chunk_first - input->pieces[p].shared_count;
    m->streamed[p] = (uint32_t)(own < left ? own : left);
    left -= m->streamed[p];
  }
}

static void run_iteration(machine_t *m) {
  const gmi_plan_input_t *input = m->facts->input;
  const gmi_plan_t *plan = m->plan;
  m->begin_ns = m->idle.stream_ns;
  m->worst_op = 0, m->worst_stall_ns = 0;
  m->groups.issued = m->groups.evaluated = m->groups.arrived = m->groups.sum = 0;
  for (uint32_t op = 0; op < input->op_count; op++) {
    uint32_t fetch = plan->fetch_first[op], fetch_end = plan->fetch_first[op + 1];
    uint32_t evict = plan->evict_first[op], evict_end = plan->evict_first[op + 1];
    uint32_t heap = input->ops[op].heap_frames, before = input->ops[op > 0 ? op - 1 : input->op_count - 1].heap_frames;
    if (heap < before) give_frames(m, m->idle.stream_ns, before - heap);
    issue_fetches(m, &fetch, fetch_end, GMI_NO_PIECE);
    issue_gathers(m, op);
    uint64_t ready_ns = take_frames(m, (uint64_t)m->fresh[op] + (heap > before ? heap - before : 0));
    m->stall_ns = 0;
    ready_ns = later(ready_ns, later(arrived_for(m, op, GMI_NO_PIECE), updated_for(m, op)));
    ready_ns = later(ready_ns, gathered_for(m, op));
    run_stage(m, ready_ns, input->ops[op].compute_ns);
    m->groups.op_end_ns[op] = m->idle.stream_ns;
    issue_sums(m, op);
    issue_evicts(m, &evict, evict_end, GMI_NO_PIECE);
    for (uint32_t i = m->facts->op_piece_first[op]; i < m->facts->op_piece_first[op + 1]; i++) {
      uint32_t piece = m->facts->op_pieces[i];
      if (!plan->piece_on_device[piece]) continue;
      issue_fetches(m, &fetch, fetch_end, piece);
      update_on_device(m, piece);
      issue_evicts(m, &evict, evict_end, piece);
    }
    if (op + 1 == input->op_count) m->idle.stream_ns += input->outside_ns;
    /* leaves only the work that is really behind, which keeps the heaps small, and may become urgent now */
    while (run_piece(m, m->idle.stream_ns)) continue;
    submit_pieces(m, op);
    submit_ahead(m, op);
    if (m->stall_ns > m->worst_stall_ns) m->worst_op = op, m->worst_stall_ns = m->stall_ns;
    /* a move names a piece that does not run on the device after this op */
    if (fetch != fetch_end || evict != evict_end) m->starved = true;
  }
  update_streamed(m);
  m->ops_before += input->op_count;
}

/* Counts, for each op, the chunks that get a frame without a fetch, and notes which slices of groups are on the device,
 * by following the plan's moves through one iteration. */
static void find_fresh(machine_t *m, uint8_t *resident) {
  const gmi_plan_input_t *input = m->facts->input;
  const gmi_plan_t *plan = m->plan;
  uint32_t gather = 0, sum = 0;
  memcpy(resident, plan->resident_at_start, input->chunk_count);
  for (uint32_t op = 0; op < input->op_count; op++) {
    uint32_t fetch = plan->fetch_first[op], evict = plan->evict_first[op];
    for (; fetch < plan->fetch_first[op + 1] && plan->fetches[fetch].piece == GMI_NO_PIECE; fetch++)
      resident[plan->fetches[fetch].chunk] = 1;
    note_parts(input->groups.gathers, input->groups.gather_count, &gather, op, resident, m->groups.here);
    for (uint32_t x = input->ops[op].access_first; x < input->ops[op + 1].access_first; x++) {
      uint32_t chunk = input->accesses[x].chunk;
      if ((input->accesses[x].mode & GMI_ACCESS_FRESH) == 0 || resident[chunk]) continue;
      resident[chunk] = 1;
      m->fresh[op]++;
    }
    note_parts(input->groups.sums, input->groups.sum_count, &sum, op, resident,
               m->groups.here + input->groups.gather_count);
    for (; evict < plan->evict_first[op + 1] && plan->evicts[evict].piece == GMI_NO_PIECE; evict++)
      resident[plan->evicts[evict].chunk] = 0;
    /* Moves of device pieces, in the order of pieces. A chunk may be fetched for a piece and leave after it, or
     * leave after one piece and be fetched for a later one; at the same piece the fetch comes first. */
    while (fetch < plan->fetch_first[op + 1] || evict < plan->evict_first[op + 1]) {
      bool fetch_first = evict == plan->evict_first[op + 1] ||
                         (fetch < plan->fetch_first[op + 1] && plan->fetches[fetch].piece <= plan->evicts[evict].piece);
      if (fetch_first) resident[plan->fetches[fetch++].chunk] = 1;
      else resident[plan->evicts[evict++].chunk] = 0;
    }
  }
}

/* Tables that end together, all zero at first. */
typedef struct rooms {
  void *items[32];
  uint32_t count;
  bool failed; /* no memory for one of them */
} rooms_t;
static void *room(rooms_t *rooms, size_t count, size_t size) {
  void *item = rooms->items[rooms->count++] = calloc(count + 1, size);
  rooms->failed |= item == NULL;
  return item;
}

gemini_status_t gmi_simulate(const gmi_facts_t *facts, gmi_plan_t *plan, uint32_t *iterations_out) {
  const gmi_plan_input_t *input = facts->input;
  if (!gmi_plan_fits(input, plan)) return GEMINI_ERR_INVALID;
  uint64_t evicts = plan->evict_first[plan->op_count], fetches = plan->fetch_first[plan->op_count];
  size_t piece_chunks = input->piece_count > 0 ? gmi_plan_piece_end(input, input->piece_count - 1) : 0;
  machine_t m = { .facts = facts, .plan = plan };
  m.runs.capacity = evicts + input->op_count + 2;
  if (m.runs.capacity > (uint64_t)input->frame_count + 2) m.runs.capacity = (uint64_t)input->frame_count + 2;
  rooms_t rooms = { .count = 0 };
  const size_t chunks = input->chunk_count, pieces = input->piece_count, ops = input->op_count;
  const size_t gathers = input->groups.gather_count, sums = input->groups.sum_count;
  m.runs.ring = room(&rooms, m.runs.capacity, sizeof *m.runs.ring);
  m.host_ready_ns = room(&rooms, chunks, sizeof *m.host_ready_ns);
  m.fetching.start_ns = room(&rooms, fetches, sizeof *m.fetching.start_ns);
  m.coming.items = room(&rooms, pieces, sizeof *m.coming.items);
  m.ready.items = room(&rooms, pieces, sizeof *m.ready.items);
  m.ready_ns = room(&rooms, pieces, sizeof *m.ready_ns);
  m.next_use = room(&rooms, pieces, sizeof *m.next_use);
  m.blocked = room(&rooms, pieces, sizeof *m.blocked);
  m.passes.had_first = room(&rooms, pieces, sizeof *m.passes.had_first);
  m.passes.too_late = room(&rooms, pieces, sizeof *m.passes.too_late);
  m.last_taker = room(&rooms, chunks, sizeof *m.last_taker);
  m.next_taker = room(&rooms, piece_chunks, sizeof *m.next_taker);
  if (input->pieces_apart) m.updated_ns = room(&rooms, chunks, sizeof *m.updated_ns);
  m.fresh = room(&rooms, ops, sizeof *m.fresh);
  m.streamed = room(&rooms, pieces, sizeof *m.streamed);
  m.queue.pieces = room(&rooms, pieces, sizeof *m.queue.pieces);
  m.queue.ns = room(&rooms, pieces, sizeof *m.queue.ns);
  m.groups.start_ns = room(&rooms, gathers, sizeof *m.groups.start_ns);
  m.groups.behind = room(&rooms, gathers, sizeof *m.groups.behind);
  m.groups.here = room(&rooms, gathers + sums, sizeof *m.groups.here);
  m.groups.host_ns = room(&rooms, gathers, sizeof *m.groups.host_ns);
  m.groups.taken = room(&rooms, gathers, sizeof *m.groups.taken);
  m.groups.updated_ns = room(&rooms, chunks, sizeof *m.groups.updated_ns);
  m.groups.came_ns = room(&rooms, chunks, sizeof *m.groups.came_ns);
  m.groups.op_end_ns = room(&rooms, ops, sizeof *m.groups.op_end_ns);
  m.groups.sum_ready_ns = room(&rooms, sums ? chunks : 0, sizeof *m.groups.sum_ready_ns);
  m.groups.gather_ns = room(&rooms, input->groups.group_count, sizeof *m.groups.gather_ns);
  m.groups.sum_ns = room(&rooms, input->groups.group_count, sizeof *m.groups.sum_ns);
  uint8_t *resident = room(&rooms, chunks, sizeof *resident);
  if (!plan->traffic) plan->traffic = calloc((size_t)input->groups.group_count + 1, sizeof *plan->traffic);
  gemini_status_t status = GEMINI_ERR_OOM_SYSTEM;
  if (rooms.failed || !plan->traffic) goto end;

  status = GEMINI_ERR_INVALID;
  uint64_t held = input->ops[input->op_count - 1].heap_frames;
  for (uint32_t c = 0; c < input->chunk_count; c++) held += plan->resident_at_start[c] != 0;
  if (held > input->frame_count) goto end;
  find_streamed(&m, resident);
  find_fresh(&m, resident);
  memset(m.ready_ns, 0xff, input->piece_count * sizeof *m.ready_ns);
  memset(m.last_taker, 0xff, input->chunk_count * sizeof *m.last_taker);
  give_frames(&m, 0, input->frame_count - held);
  /* Steady: an iteration lasts as long as the one before and leaves the same work behind on every resource. */
  uint64_t length_ns = 0, behind_ns[7] = { 0 }, dirty = 0, apart_ns = 0;
  uint32_t iteration = 0;
  for (bool steady = false; iteration < MAX_ITERATIONS && !steady; iteration++) {
    run_iteration(&m);
    if (m.starved) goto end;
    uint64_t fetch_ns = m.idle.fetch_ns;
    for (uint32_t k = 0, f = m.fetching.first; k < m.fetching.count; k++, f = f + 1 < fetches ? f + 1 : 0)
      if (k >= m.fetching.evaluated) fetch_ns = fetched(&m, f, fetch_ns);
    uint64_t gather_ns = latest_of(m.groups.gather_ns, input->groups.group_count);
    uint64_t sum_ns = latest_of(m.groups.sum_ns, input->groups.group_count);
    uint64_t behind_now_ns[7] = { later(fetch_ns, m.idle.stream_ns) - m.idle.stream_ns,
                                  later(m.idle.evict_ns, m.idle.stream_ns) - m.idle.stream_ns,
                                  later(m.idle.update_ns, m.idle.stream_ns) - m.idle.stream_ns + m.owed_ns,
                                  later(m.idle.file_ns, m.idle.stream_ns) - m.idle.stream_ns,
                                  later(m.idle.device_update_ns, m.idle.stream_ns) - m.idle.stream_ns,
                                  later(gather_ns, m.idle.stream_ns) - m.idle.stream_ns,
                                  later(sum_ns, m.idle.stream_ns) - m.idle.stream_ns };
    steady = iteration > 0 && length_ns == m.idle.stream_ns - m.begin_ns &&
             memcmp(behind_ns, behind_now_ns, sizeof behind_ns) == 0;
    length_ns = m.idle.stream_ns - m.begin_ns;
    memcpy(behind_ns, behind_now_ns, sizeof behind_ns);
  }
  for (uint64_t e = 0; e < evicts; e++) dirty += (plan->evicts[e].flags & GMI_EVICT_DIRTY) != 0;
  plan->compute_ns = input->outside_ns, plan->update_busy_ns = 0;
  for (uint32_t op = 0; op < input->op_count; op++) plan->compute_ns += input->ops[op].compute_ns;
  for (uint32_t p = 0; p < input->piece_count; p++) {
    if (plan->piece_on_device[p]) *(input->pieces_apart ? &apart_ns : &plan->compute_ns) += input->pieces[p].device_ns;
    else if (plan->piece_passes[p] && plan->piece_ahead[p] != GMI_AHEAD_ALL)
      plan->update_busy_ns += input->pieces[p].result_ns + input->pieces[p].state_ns;
    else plan->update_busy_ns += input->pieces[p].host_ns;
  }
  plan->file_chunks = m.file_chunks;
  plan->file_busy_ns = plan->file_chunks * (input->file_read_ns + input->file_write_ns);
  plan->fetch_busy_ns = fetches * input->fetch_ns;
  plan->evict_busy_ns = dirty * input->evict_ns;
  count_traffic(&m, plan);
  /* A resource that nothing waits for yet may still fall behind a little in each iteration, so the busy time of each
   * resource is a lower bound. */
  plan->predicted_ns = later(later(length_ns, plan->update_busy_ns), later(plan->fetch_busy_ns, plan->evict_busy_ns));
  plan->predicted_ns = later(plan->predicted_ns, later(plan->file_busy_ns, apart_ns));
  plan->predicted_ns = later(plan->predicted_ns, later(plan->gather_busy_ns, plan->sum_busy_ns));
  plan->worst_op = m.worst_op;
  plan->worst_stall_ns = m.worst_stall_ns;
  if (iterations_out != NULL) *iterations_out = iteration;
  status = GEMINI_OK;
end:
  for (uint32_t i = 0; i < rooms.count; i++) free(rooms.items[i]);
  return status;
}
