/* Comparing the ranks' iterations: see group_check.h. SPDX-License-Identifier: Apache-2.0
 *
 * The thread makes one exchange for each post, and three if the ranks differ: all ranks see the same digests, so all of
 * them make the others. Exchanges of one communicator come in one order on all ranks, as any other exchange waits for
 * what was posted before it (gmi_group_check_settle()). */
#include "chunk/group_check.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/thread.h"
#include "chunk/shard.h"
#include "core/watch.h"

enum { TEXT_BYTES = GMI_JOURNAL_TEXT_BYTES };

/* What the ranks exchange. All must be equal. */
typedef struct {
  uint64_t number, layout, bucket_chunks, operators, plan, gathers, sums;
  uint64_t op_count;
} digest_t;

typedef struct gmi_group_check {
  pthread_t thread;
  pthread_mutex_t lock; /* guards all below */
  pthread_cond_t changed;
  bool posted, ends;
  digest_t digest;        /* of the post */
  gmi_journal_t *journal; /* likewise; the post is a user */
  uint64_t posts;
} gmi_group_check_t;

gmi_journal_t *gmi_journal_new(uint32_t op_count, uint64_t text_bytes) {
  gmi_journal_t *j = calloc(1, sizeof *j);
  if (!j) return NULL;
  j->ops = calloc((size_t)op_count + 1, sizeof *j->ops);
  j->texts = calloc(text_bytes + 1, 1);
  atomic_store(&j->users, 1);
  if (j->ops && j->texts) return j;
  gmi_journal_drop(j);
  return NULL;
}
void gmi_journal_drop(gmi_journal_t *j) {
  if (!j || atomic_fetch_sub(&j->users, 1) > 1) return;
  free(j->ops);
  free(j->texts);
  free(j);
}

/* ---- where ranks differ */
static const gmi_comm_t *comm_of(const gmi_group_t *g) { return g->exchange.ops ? &g->exchange : &g->reduce; }
static gemini_status_t exchange(const gmi_group_t *g, const void *mine, uint64_t bytes, void *all_out) {
  const gmi_comm_t *comm = comm_of(g);
  return comm->ops->exchange(comm->self, mine, bytes, all_out, "the comparison of an iteration");
}

/* The first rank that differs from rank 0; ranks: none does. */
static uint32_t other_of(const digest_t *all, uint32_t ranks) {
  uint32_t r = 1;
  while (r < ranks && !memcmp(&all[r], &all[0], sizeof *all)) r++;
  return r;
}

/* The first operator that two ranks do not share. */
static uint64_t first_difference(const gmi_journal_op_t *a, const gmi_journal_op_t *b, uint64_t count) {
  uint64_t i = 0;
  while (i < count && a[i].chunks == b[i].chunks && a[i].named == b[i].named) i++;
  return i;
}

/* Finds the operator, and says what the two ranks have there. all: digests. */
static gemini_status_t find(const gmi_group_t *g, const gmi_journal_t *j, const digest_t *all, uint32_t other,
                            char *why_out, size_t size) {
  const uint32_t ranks = g->ranks;
  uint64_t count = all[0].op_count > all[other].op_count ? all[0].op_count : all[other].op_count;
  for (uint32_t r = 0; r < ranks; r++)
    if (all[r].op_count > count) count = all[r].op_count;
  gmi_journal_op_t *mine = calloc(count + 1, sizeof *mine), *theirs = calloc(ranks * (count + 1), sizeof *theirs);
  char text[TEXT_BYTES] = "the end of the iteration", *texts = calloc(ranks, sizeof text);
  gemini_status_t status = GEMINI_OK;
  if (!mine || !theirs || !texts) status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to compare iterations");
  if (!status) {
    for (uint32_t i = 0; i < j->op_count; i++) mine[i] = (gmi_journal_op_t){ j->ops[i].chunks, j->ops[i].named, 0 };
    status = exchange(g, mine, count * sizeof *mine, theirs);
  }
  if (!status) {
    const uint64_t at = first_difference(theirs, theirs + other * count, count);
    if (at < j->op_count) snprintf(text, sizeof text, "%s", j->texts + j->ops[at].text);
    status = exchange(g, text, sizeof text, texts);
    if (status) *why_out = 0;
    else if (at < count)
      snprintf(why_out, size, "ranks differ in an iteration: after %" PRIu64 " operators rank 0 has %s, rank %u has %s",
               at, texts, other, texts + other * sizeof text);
    else
      snprintf(why_out, size, "ranks differ: rank 0 and rank %u have the same operators in an iteration, but other %s",
               other,
               all[0].layout != all[other].layout                 ? "sharded arenas"
               : all[0].bucket_chunks != all[other].bucket_chunks ? "chunks in a bucket of gradients (bucket_bytes)"
               : all[0].plan != all[other].plan                   ? "plans of gathers"
               : all[0].sums != all[other].sums                   ? "sums of gradients"
                                                                  : "gathers");
  }
  free(mine);
  free(theirs);
  free(texts);
  return status;
}

static gemini_status_t compare(const gmi_group_t *g, const gmi_journal_t *j, const digest_t *mine, char *why_out,
                               size_t size) {
  const uint32_t ranks = g->ranks;
  digest_t *all = calloc(ranks, sizeof *all);
  if (!all) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the digests of %u ranks", ranks);
  gemini_status_t status = exchange(g, mine, sizeof *mine, all);
  const uint32_t other = status ? ranks : other_of(all, ranks);
  if (other < ranks) status = find(g, j, all, other, why_out, size);
  free(all);
  return status;
}

/* ---- the thread */
static void *check_main(void *user) {
  gmi_group_t *g = user;
  gmi_group_check_t *k = g->check;
  pthread_mutex_lock(&k->lock);
  for (;;) {
    while (!k->posted && !k->ends) pthread_cond_wait(&k->changed, &k->lock);
    if (!k->posted) break;
    char why[GMI_GROUP_WHY_BYTES] = "";
    pthread_mutex_unlock(&k->lock);
    gemini_status_t status = compare(g, k->journal, &k->digest, why, sizeof why);
    if (status && !*why) snprintf(why, sizeof why, "%s", gmi_fail_message());
    if (*why) gmi_group_give_up(g, why);
    pthread_mutex_lock(&k->lock);
    gmi_journal_drop(k->journal);
    k->journal = NULL;
    k->posted = false;
    pthread_cond_broadcast(&k->changed);
  }
  pthread_mutex_unlock(&k->lock);
  return NULL;
}

gemini_status_t gmi_group_check_open(gmi_group_t *g) {
  if (g->ranks == 1) return GEMINI_OK;
  gmi_group_check_t *k = calloc(1, sizeof *k);
  if (!k) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the comparisons of a group");
  pthread_mutex_init(&k->lock, NULL);
  pthread_cond_init(&k->changed, NULL);
  g->check = k;
  int error = gmi_thread_start(&k->thread, check_main, g);
  if (!error) return GEMINI_OK;
  g->check = NULL;
  pthread_cond_destroy(&k->changed);
  pthread_mutex_destroy(&k->lock);
  free(k);
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "no thread to compare the iterations of a group");
}

void gmi_group_check_close(gmi_group_t *g) {
  gmi_group_check_t *k = g->check;
  if (!k) return;
  pthread_mutex_lock(&k->lock);
  k->ends = true;
  pthread_cond_broadcast(&k->changed);
  pthread_mutex_unlock(&k->lock);
  pthread_join(k->thread, NULL);
  pthread_cond_destroy(&k->changed);
  pthread_mutex_destroy(&k->lock);
  free(k);
  g->check = NULL;
}

gemini_status_t gmi_group_check_settle(gmi_group_t *g) {
  gmi_group_check_t *k = g->check;
  if (k) {
    pthread_mutex_lock(&k->lock);
    while (k->posted) pthread_cond_wait(&k->changed, &k->lock);
    pthread_mutex_unlock(&k->lock);
  }
  return gmi_group_failure(g);
}

gemini_status_t gmi_group_check_post(gmi_manager_t *m, gmi_group_t *g, gmi_journal_t *journal, uint64_t plan) {
  if (!g->check) return GEMINI_OK; /* one rank */
  if (g->exchanging && g->exchange.ops)
    return gmi_fail(GEMINI_ERR_BUSY, 0, "another thread's exchange of the group is under way");
  gmi_wait_t wait;
  gmi_wait_for_ranks(m, &wait, NULL, g->rank, "the comparison of iterations", NULL);
  gemini_status_t status = gmi_group_check_settle(g);
  gmi_wait_end(m, &wait);
  if (status) return status;
  gmi_group_check_t *k = g->check;
  pthread_mutex_lock(&k->lock);
  k->digest = (digest_t){ .number = ++k->posts,
                          .layout = journal->layout,
                          .bucket_chunks = gmi_bucket_chunks(m, g),
                          .operators = journal->operators,
                          .plan = plan,
                          .gathers = g->queued.gathers,
                          .sums = g->queued.sums,
                          .op_count = journal->op_count };
  g->queued.gathers = g->queued.sums = 0;
  atomic_fetch_add(&journal->users, 1);
  k->journal = journal;
  k->posted = true;
  pthread_cond_broadcast(&k->changed);
  pthread_mutex_unlock(&k->lock);
  return GEMINI_OK;
}
