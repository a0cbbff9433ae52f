/* Predicts the step time of a plan: one compute stream, one link each way, the update workers as one resource.
 * SPDX-License-Identifier: Apache-2.0
 *
 * - A step starts when the one before has ended, its chunks have arrived and the frames it takes itself (chunks it
 *   overwrites, growth of non-model memory) are free.
 * - A fetch starts when the link has done those before it, a frame is free and the bytes on the host are current.
 *   Frames are taken in the order in which they were given back: a clean chunk's when the step ended, a dirty one's
 *   when it is written back, non-model memory's when the op before ended.
 * - A host piece is ready when its op has ended, its chunks are written back and the pieces before it that take one
 *   of them are done. The workers, when free, take of the ready pieces the one whose shared chunks an op uses next
 *   soonest, of equals the lowest index; when none is ready they wait for the first that becomes so. Its chunks are
 *   current a delay after its work, as each worker has other work to end first. A piece ends before it is submitted
 *   again.
 * - Where the host has no room for all states, the last pieces of an iteration are streamed: their states are read
 *   from files ahead of the update and written after it, a few pieces at once, by one resource. They wait for nothing
 *   else, and run behind the other host pieces.
 * - A device piece is a step of the compute stream, behind its op; or, where pieces run apart, it starts when its op
 *   and the device piece before have ended, and whoever uses its chunks next waits for it.
 * - The host issues ahead of the device at no cost, but at an iteration's begin it waits for the compute stream, since
 *   users read the loss there; so nothing that this iteration issues starts earlier. What is in flight goes on.
 * One pass in program order suffices: everything waits for earlier things only. What depends on which piece the workers
 * took is put off until a step waits for it: fetches, and with them the pieces that update what they bring. All pieces
 * submitted later are ready only behind that step, so they change nothing. (Nearly so where device pieces run
 * apart.) */
#include <stdlib.h>
#include <string.h>

#include "policy/model.h"

#define MAX_ITERATIONS 6
#define NONE UINT32_MAX
#define NOT_SUBMITTED UINT64_MAX

/* Free frames, oldest first, in runs with one time. Invariant: total is the sum of counts. */
typedef struct frame_run {
  uint64_t ready_ns;
  uint64_t count;
} frame_run_t;

/* Binary heap of pieces: least key first, of equals the lowest index. */
typedef struct waiting {
  uint64_t key;
  uint32_t piece;
} waiting_t;
typedef struct heap {
  waiting_t *items; /* [piece_count + 1] */
  uint32_t count;
} heap_t;

typedef struct machine {
  const gmi_facts_t *facts;
  const gmi_plan_t *plan;
  struct {
    frame_run_t *ring;
    uint64_t capacity, first, count;
  } runs;
  uint64_t free_frames;
  uint64_t *host_ready_ns;  /* [chunk_count] when the copy on the host is current, but for pieces not done yet */
  uint64_t *fetch_start_ns; /* [fetches] of one that is issued: when it has its frame */
  uint32_t arriving;        /* the first fetch issued and put off; they come in order of need, so in this order */
  uint32_t arriving_count;
  heap_t coming, ready; /* pieces not blocked, by when they are ready; of these, those seen to be ready, by next use */
  uint64_t *ready_ns; /* [piece_count] NOT_SUBMITTED unless submitted and not done; blocked: of what is known so far */
  uint64_t *next_use; /* [piece_count] then: op, counted over all iterations */
  uint32_t *blocked;  /* [piece_count] then: pieces before it to be done, counted for each chunk */
  uint32_t *last_taker; /* [chunk_count] the last piece not done that takes it, as an index of piece_chunks; NONE */
  uint32_t *next_taker; /* [piece_chunks] then: the piece that takes the chunk next; NONE */
  uint64_t owed_ns;     /* work of pieces not done */
  uint64_t ops_before;  /* this iteration */
  uint64_t *updated_ns; /* [chunk_count] when its last device piece is done; only where pieces run apart */
  uint32_t *fresh;      /* [op_count] chunks that arrive by being overwritten */
  uint32_t *streamed;   /* [piece_count] state chunks that are read and written for this piece; 0: none */
  struct {
    uint32_t *pieces; /* [piece_count] the iteration's streamed ones */
    uint64_t *ns;     /* [piece_count] when they were submitted; then when they were done */
    uint32_t count;
  } queue;
  uint64_t file_chunks; /* read, and written, in an iteration */
  uint64_t begin_ns;    /* of the iteration */
  struct {              /* when each resource is free */
    uint64_t stream_ns, device_update_ns, fetch_ns, evict_ns, update_ns, file_ns;
  } idle;
  uint64_t worst_stall_ns, stall_ns; /* of this iteration; of this op */
  uint32_t worst_op;
  bool starved; /* a frame was wanted and none is free: the plan is not of this input */
} machine_t;

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
  if (m->runs.count == m->runs.capacity) { /* join the two oldest: frames that wait this long are ready anyway */
    frame_run_t *oldest = &m->runs.ring[m->runs.first], *second = &m->runs.ring[(m->runs.first + 1) % m->runs.capacity];
    second->count += oldest->count;
    if (second->ready_ns < oldest->ready_ns) second->ready_ns = oldest->ready_ns;
    m->runs.first = (m->runs.first + 1) % m->runs.capacity;
    m->runs.count--;
  }
  m->runs.ring[(m->runs.first + m->runs.count++) % m->runs.capacity] = (frame_run_t){ ready_ns, count };
}

/* Takes frames; returns when the last of them is ready. */
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

/* Runs the piece that the workers take next, if it starts before that time; false if there is none. */
static bool run_piece(machine_t *m, uint64_t before_ns) {
  const gmi_plan_input_t *input = m->facts->input;
  if (m->ready.count == 0 && m->coming.count == 0) return false;
  uint64_t start_ns = m->ready.count > 0 ? m->idle.update_ns : later(m->idle.update_ns, m->coming.items[0].key);
  if (start_ns >= before_ns) return false;
  while (m->coming.count > 0 && m->coming.items[0].key <= start_ns) {
    uint32_t piece = pop(&m->coming);
    push(&m->ready, m->next_use[piece], piece);
  }
  uint32_t piece = pop(&m->ready);
  m->idle.update_ns = start_ns + input->pieces[piece].host_ns;
  m->owed_ns -= input->pieces[piece].host_ns;
  m->ready_ns[piece] = NOT_SUBMITTED;
  uint64_t done_ns = m->idle.update_ns + input->host_delay_ns;
  for (uint32_t i = input->pieces[piece].chunk_first; i < gmi_plan_piece_end(input, piece); i++) {
    uint32_t chunk = input->piece_chunks[i], next = m->next_taker[i];
    m->host_ready_ns[chunk] = later(m->host_ready_ns[chunk], done_ns);
    if (next == NONE) {
      m->last_taker[chunk] = NONE;
    } else {
      m->ready_ns[next] = later(m->ready_ns[next], done_ns);
      if (--m->blocked[next] == 0) push(&m->coming, m->ready_ns[next], next);
    }
  }
  return true;
}

static void submit(machine_t *m, uint32_t piece) {
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
  m->next_use[piece] = m->facts->piece_use[piece] == NONE ? UINT64_MAX : m->ops_before + m->facts->piece_use[piece];
  m->owed_ns += input->pieces[piece].host_ns;
  if (m->blocked[piece] == 0) push(&m->coming, ready_ns, piece);
}

static void issue_fetches(machine_t *m, uint32_t *next, uint32_t end, uint32_t piece) {
  for (; *next < end && m->plan->fetches[*next].piece == piece; ++*next) {
    m->fetch_start_ns[*next] = later(m->begin_ns, take_frames(m, 1));
    if (m->arriving_count++ == m->plan->fetch_first[m->plan->op_count]) m->starved = true; /* one is for no step */
  }
}

/* When this fetch is done, if the one before it is done at fetch_ns. */
static uint64_t fetched(const machine_t *m, uint32_t f, uint64_t fetch_ns) {
  uint64_t host_ready_ns = m->host_ready_ns[m->plan->fetches[f].chunk];
  return later(later(fetch_ns, m->fetch_start_ns[f]), host_ready_ns) + m->facts->input->fetch_ns;
}

/* When the last fetch for this step is done. */
static uint64_t arrived_for(machine_t *m, uint32_t op, uint32_t piece) {
  uint64_t ready_ns = 0;
  for (; m->arriving_count > 0; m->arriving_count--) {
    const gmi_plan_move_t *move = &m->plan->fetches[m->arriving];
    if (move->use_op != op || move->use_piece != piece) break;
    while (m->last_taker[move->chunk] != NONE) run_piece(m, UINT64_MAX);
    ready_ns = m->idle.fetch_ns = fetched(m, m->arriving, m->idle.fetch_ns);
    if (++m->arriving == m->plan->fetch_first[m->plan->op_count]) m->arriving = 0;
  }
  return ready_ns;
}

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

static void run_step(machine_t *m, uint64_t ready_ns, uint64_t duration_ns) {
  if (ready_ns > m->idle.stream_ns) {
    m->stall_ns += ready_ns - m->idle.stream_ns;
    m->idle.stream_ns = ready_ns;
  }
  m->idle.stream_ns += duration_ns;
}

/* On a stream of its own, where there is one, behind the op; else as a step of the compute stream. */
static void update_on_device(machine_t *m, uint32_t piece) {
  const gmi_plan_input_t *input = m->facts->input;
  uint64_t ready_ns = arrived_for(m, input->pieces[piece].after_op, piece);
  if (!m->updated_ns) {
    run_step(m, ready_ns, input->pieces[piece].device_ns);
    return;
  }
  m->idle.device_update_ns =
      later(later(m->idle.device_update_ns, m->idle.stream_ns), ready_ns) + input->pieces[piece].device_ns;
  for (uint32_t i = input->pieces[piece].chunk_first; i < gmi_plan_piece_end(input, piece); i++)
    m->updated_ns[input->piece_chunks[i]] = m->idle.device_update_ns;
}

/* When the pieces are done whose chunks the op uses. */
static uint64_t updated_for(const machine_t *m, uint32_t op) {
  const gmi_plan_input_t *input = m->facts->input;
  uint64_t ready_ns = 0;
  for (uint32_t x = input->ops[op].access_first; m->updated_ns && x < input->ops[op + 1].access_first; x++)
    ready_ns = later(ready_ns, m->updated_ns[input->accesses[x].chunk]);
  return ready_ns;
}

static void update_read(machine_t *m, uint32_t piece) {
  const gmi_plan_input_t *input = m->facts->input;
  uint32_t first = input->pieces[piece].chunk_first, end = gmi_plan_piece_end(input, piece);
  uint64_t start_ns = later(m->idle.update_ns, m->idle.file_ns);
  for (uint32_t i = first; i < end; i++) start_ns = later(start_ns, m->host_ready_ns[input->piece_chunks[i]]);
  m->idle.update_ns = start_ns + input->pieces[piece].host_ns;
  for (uint32_t i = first; i < end; i++) m->host_ready_ns[input->piece_chunks[i]] = m->idle.update_ns;
}

/* Reads go on as far ahead as pieces may be under way; a piece's write comes when that many later ones were read. */
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

/* States that have no place on the device for good and for which the host has no room. Those of host pieces are
 * streamed; those that come and go for device pieces only count as work of the files. */
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
  uint64_t ring = largest * input->host_pieces_ahead; /* slots of pieces under way */
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
  for (uint32_t op = 0; op < input->op_count; op++) {
    uint32_t fetch = plan->fetch_first[op], fetch_end = plan->fetch_first[op + 1];
    uint32_t evict = plan->evict_first[op], evict_end = plan->evict_first[op + 1];
    uint32_t heap = input->ops[op].heap_frames, before = input->ops[op > 0 ? op - 1 : input->op_count - 1].heap_frames;
    if (heap < before) give_frames(m, m->idle.stream_ns, before - heap);
    issue_fetches(m, &fetch, fetch_end, GMI_NO_PIECE);
    uint64_t ready_ns = take_frames(m, (uint64_t)m->fresh[op] + (heap > before ? heap - before : 0));
    m->stall_ns = 0;
    ready_ns = later(ready_ns, later(arrived_for(m, op, GMI_NO_PIECE), updated_for(m, op)));
    run_step(m, ready_ns, input->ops[op].compute_ns);
    issue_evicts(m, &evict, evict_end, GMI_NO_PIECE);
    for (uint32_t i = m->facts->op_piece_first[op]; i < m->facts->op_piece_first[op + 1]; i++) {
      uint32_t piece = m->facts->op_pieces[i];
      if (!plan->piece_on_device[piece]) continue;
      issue_fetches(m, &fetch, fetch_end, piece);
      update_on_device(m, piece);
      issue_evicts(m, &evict, evict_end, piece);
    }
    for (uint32_t i = m->facts->op_piece_first[op]; i < m->facts->op_piece_first[op + 1]; i++) {
      uint32_t piece = m->facts->op_pieces_by_use[i];
      if (plan->piece_on_device[piece]) continue;
      if (m->streamed[piece] == 0) {
        submit(m, piece);
      } else {
        m->queue.pieces[m->queue.count] = piece;
        m->queue.ns[m->queue.count++] = m->idle.stream_ns;
      }
    }
    while (run_piece(m, m->idle.stream_ns)) continue; /* so that what is left is work behind, and little */
    if (m->stall_ns > m->worst_stall_ns) m->worst_op = op, m->worst_stall_ns = m->stall_ns;
    if (fetch != fetch_end || evict != evict_end) m->starved = true; /* a move names a piece that does not run here */
  }
  update_streamed(m);
  m->ops_before += input->op_count;
}

/* Counts for each op the chunks that get a frame without a fetch, by following the plan's moves. */
static void find_fresh(machine_t *m, uint8_t *resident) {
  const gmi_plan_input_t *input = m->facts->input;
  const gmi_plan_t *plan = m->plan;
  memcpy(resident, plan->resident_at_start, input->chunk_count);
  for (uint32_t op = 0; op < input->op_count; op++) {
    uint32_t fetch = plan->fetch_first[op], evict = plan->evict_first[op];
    for (; fetch < plan->fetch_first[op + 1] && plan->fetches[fetch].piece == GMI_NO_PIECE; fetch++)
      resident[plan->fetches[fetch].chunk] = 1;
    for (uint32_t x = input->ops[op].access_first; x < input->ops[op + 1].access_first; x++) {
      uint32_t chunk = input->accesses[x].chunk;
      if ((input->accesses[x].mode & GMI_ACCESS_FRESH) == 0 || resident[chunk]) continue;
      resident[chunk] = 1;
      m->fresh[op]++;
    }
    for (; evict < plan->evict_first[op + 1] && plan->evicts[evict].piece == GMI_NO_PIECE; evict++)
      resident[plan->evicts[evict].chunk] = 0;
    /* The pieces' moves: a chunk may be fetched for one and leave after it, never the other way round, unless it
     * leaves after one piece and comes for a later one. The order of pieces tells. */
    while (fetch < plan->fetch_first[op + 1] || evict < plan->evict_first[op + 1]) {
      bool fetch_first = evict == plan->evict_first[op + 1] ||
                         (fetch < plan->fetch_first[op + 1] && plan->fetches[fetch].piece <= plan->evicts[evict].piece);
      if (fetch_first) resident[plan->fetches[fetch++].chunk] = 1;
      else resident[plan->evicts[evict++].chunk] = 0;
    }
  }
}

static bool moves_fit(const gmi_plan_input_t *input, const gmi_plan_t *plan) {
  if (plan->op_count != input->op_count || plan->chunk_count != input->chunk_count ||
      plan->piece_count != input->piece_count)
    return false;
  for (uint32_t f = 0; f < plan->fetch_first[plan->op_count]; f++) {
    const gmi_plan_move_t *move = &plan->fetches[f];
    if (move->chunk >= plan->chunk_count || move->use_op >= plan->op_count ||
        (move->use_piece >= plan->piece_count && move->use_piece != GMI_NO_PIECE))
      return false;
  }
  for (uint32_t e = 0; e < plan->evict_first[plan->op_count]; e++)
    if (plan->evicts[e].chunk >= plan->chunk_count) return false;
  return true;
}

gemini_status_t gmi_simulate(const gmi_facts_t *facts, gmi_plan_t *plan, uint32_t *iterations_out) {
  const gmi_plan_input_t *input = facts->input;
  if (!moves_fit(input, plan)) return GEMINI_ERR_INVALID;
  uint64_t evicts = plan->evict_first[plan->op_count], fetches = plan->fetch_first[plan->op_count];
  size_t piece_chunks = input->piece_count > 0 ? gmi_plan_piece_end(input, input->piece_count - 1) : 0;
  machine_t m = { .facts = facts, .plan = plan };
  m.runs.capacity = evicts + input->op_count + 2;
  if (m.runs.capacity > (uint64_t)input->frame_count + 2) m.runs.capacity = (uint64_t)input->frame_count + 2;
  m.runs.ring = malloc(m.runs.capacity * sizeof *m.runs.ring);
  m.host_ready_ns = calloc((size_t)input->chunk_count + 1, sizeof *m.host_ready_ns);
  m.fetch_start_ns = malloc((fetches + 1) * sizeof *m.fetch_start_ns);
  m.coming.items = malloc(((size_t)input->piece_count + 1) * sizeof *m.coming.items);
  m.ready.items = malloc(((size_t)input->piece_count + 1) * sizeof *m.ready.items);
  m.ready_ns = malloc(((size_t)input->piece_count + 1) * sizeof *m.ready_ns);
  m.next_use = malloc(((size_t)input->piece_count + 1) * sizeof *m.next_use);
  m.blocked = calloc((size_t)input->piece_count + 1, sizeof *m.blocked);
  m.last_taker = malloc(((size_t)input->chunk_count + 1) * sizeof *m.last_taker);
  m.next_taker = malloc((piece_chunks + 1) * sizeof *m.next_taker);
  if (input->pieces_apart) m.updated_ns = calloc((size_t)input->chunk_count + 1, sizeof *m.updated_ns);
  m.fresh = calloc(input->op_count, sizeof *m.fresh);
  m.streamed = calloc((size_t)input->piece_count + 1, sizeof *m.streamed);
  m.queue.pieces = calloc((size_t)input->piece_count + 1, sizeof *m.queue.pieces);
  m.queue.ns = calloc((size_t)input->piece_count + 1, sizeof *m.queue.ns);
  uint8_t *resident = malloc((size_t)input->chunk_count + 1);
  gemini_status_t status = GEMINI_ERR_OOM_SYSTEM;
  if (m.runs.ring == NULL || m.host_ready_ns == NULL || m.fetch_start_ns == NULL || m.coming.items == NULL ||
      m.ready.items == NULL || m.ready_ns == NULL || m.next_use == NULL || m.blocked == NULL || m.last_taker == NULL ||
      m.next_taker == NULL || (input->pieces_apart && m.updated_ns == NULL) || m.fresh == NULL || m.streamed == NULL ||
      m.queue.pieces == NULL || m.queue.ns == NULL || resident == NULL)
    goto end;

  status = GEMINI_ERR_INVALID;
  uint64_t held = input->ops[input->op_count - 1].heap_frames;
  for (uint32_t c = 0; c < input->chunk_count; c++) held += plan->resident_at_start[c] != 0;
  if (held > input->frame_count) goto end;
  find_streamed(&m, resident);
  find_fresh(&m, resident);
  memset(m.ready_ns, 0xff, input->piece_count * sizeof *m.ready_ns);
  memset(m.last_taker, 0xff, input->chunk_count * sizeof *m.last_taker);
  give_frames(&m, 0, input->frame_count - held);
  /* Steady when an iteration lasts as long as the one before and leaves the same work behind. */
  uint64_t length_ns = 0, behind_ns[5] = { 0 };
  uint32_t iteration = 0;
  for (bool steady = false; iteration < MAX_ITERATIONS && !steady; iteration++) {
    run_iteration(&m);
    if (m.starved) goto end;
    uint64_t fetch_ns = m.idle.fetch_ns;
    for (uint32_t k = 0, f = m.arriving; k < m.arriving_count; k++, f = f + 1 < fetches ? f + 1 : 0)
      fetch_ns = fetched(&m, f, fetch_ns);
    uint64_t behind_now_ns[5] = { later(fetch_ns, m.idle.stream_ns) - m.idle.stream_ns,
                                  later(m.idle.evict_ns, m.idle.stream_ns) - m.idle.stream_ns,
                                  later(m.idle.update_ns, m.idle.stream_ns) - m.idle.stream_ns + m.owed_ns,
                                  later(m.idle.file_ns, m.idle.stream_ns) - m.idle.stream_ns,
                                  later(m.idle.device_update_ns, m.idle.stream_ns) - m.idle.stream_ns };
    steady = iteration > 0 && length_ns == m.idle.stream_ns - m.begin_ns &&
             memcmp(behind_ns, behind_now_ns, sizeof behind_ns) == 0;
    length_ns = m.idle.stream_ns - m.begin_ns;
    memcpy(behind_ns, behind_now_ns, sizeof behind_ns);
  }
  uint64_t dirty = 0;
  for (uint64_t e = 0; e < evicts; e++) dirty += (plan->evicts[e].flags & GMI_EVICT_DIRTY) != 0;
  plan->compute_ns = plan->update_busy_ns = 0;
  uint64_t apart_ns = 0;
  for (uint32_t op = 0; op < input->op_count; op++) plan->compute_ns += input->ops[op].compute_ns;
  for (uint32_t p = 0; p < input->piece_count; p++) {
    if (plan->piece_on_device[p]) *(input->pieces_apart ? &apart_ns : &plan->compute_ns) += input->pieces[p].device_ns;
    else plan->update_busy_ns += input->pieces[p].host_ns;
  }
  plan->file_chunks = m.file_chunks;
  plan->file_busy_ns = plan->file_chunks * (input->file_read_ns + input->file_write_ns);
  plan->fetch_busy_ns = fetches * input->fetch_ns;
  plan->evict_busy_ns = dirty * input->evict_ns;
  /* A resource that nothing waits for yet can still be the one that falls behind a little in each iteration. */
  plan->predicted_ns = later(later(length_ns, plan->update_busy_ns), later(plan->fetch_busy_ns, plan->evict_busy_ns));
  plan->predicted_ns = later(plan->predicted_ns, later(plan->file_busy_ns, apart_ns));
  plan->stall_ns = plan->predicted_ns - plan->compute_ns;
  plan->worst_op = m.worst_op;
  plan->worst_stall_ns = m.worst_stall_ns;
  if (iterations_out != NULL) *iterations_out = iteration;
  status = GEMINI_OK;
end:
  free(m.runs.ring);
  free(m.host_ready_ns);
  free(m.fetch_start_ns);
  free(m.coming.items);
  free(m.ready.items);
  free(m.ready_ns);
  free(m.next_use);
  free(m.blocked);
  free(m.last_taker);
  free(m.next_taker);
  free(m.updated_ns);
  free(m.fresh);
  free(m.streamed);
  free(m.queue.pieces);
  free(m.queue.ns);
  free(resident);
  return status;
}
