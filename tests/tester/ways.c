/* Programs that fail, and --every-way. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "settings.h"

static void program_write(FILE *file, const options_t *o, const op_t *ops, uint64_t count) {
  fprintf(file, "# threads %u cuda %u files %u\n", o->threads, o->cuda, o->files);
  for (uint64_t i = 0; i < count; i++) op_write(file, &ops[i]);
}

void tell_failure(const settings_t *s, shared_t *shared, const outcome_t *o, const op_t *replayed,
                  uint64_t replayed_count) {
  fprintf(stderr, "seed %llu %s after %.1f s: %s", (unsigned long long)s->options.seed, end_words(o), o->seconds,
          *o->message ? o->message : "\n");
  if (!replayed)
    fprintf(stderr, "  again: %s --seed %llu --steps %llu%s\n", s->program, (unsigned long long)s->options.seed,
            (unsigned long long)s->options.steps, s->arguments);
  uint64_t count = replayed_count;
  op_t *ops = replayed ? NULL : program_of(shared, &s->options, &count), *shrunk = NULL;
  const op_t *best = replayed ? replayed : ops;
  if (s->shrinks) best = shrunk = shrink(&s->options, best, &count, o, s->shrink_s);
  if (s->shrinks && count <= 60) program_write(stderr, &s->options, best, count);
  char path[128];
  snprintf(path, sizeof path, "tester.%llu.program", (unsigned long long)s->options.seed);
  const char *to = s->save ? s->save : s->shrinks ? path : NULL;
  FILE *file = to ? fopen(to, "w") : NULL;
  if (file) {
    program_write(file, &s->options, best, count);
    fclose(file);
    fprintf(stderr, "  its program: tester --replay %s\n", to);
  }
  free(ops);
  free(shrunk);
}

/* ---- --every-way: in every way in which the library makes system calls, one call fails */
typedef struct ways {
  fault_site_t *all;
  uint32_t count, places, failed;
} ways_t;
static bool is_known(const ways_t *w, const fault_site_t *site) {
  for (uint32_t i = 0; i < w->count; i++)
    if (w->all[i].path == site->path) return true;
  return false;
}
static bool place_is_known(const ways_t *w, const fault_site_t *site) {
  for (uint32_t i = 0; i < w->count; i++)
    if (w->all[i].place == site->place) return true;
  return false;
}

/* Makes a call fail in each way of this program that no earlier program had. */
static bool fail_ways(settings_t *s, watch_t watch, ways_t *w, const op_t *ops, uint64_t count) {
  shared_t *shared = watch.shared;
  uint32_t found = shared->site_count;
  fault_site_t *sites = malloc((found + 1) * sizeof *sites);
  memcpy(sites, shared->site, found * sizeof *sites);
  bool fine = true;
  for (uint32_t i = 0; i < found && (fine || s->options.keep_going); i++) {
    if (is_known(w, &sites[i])) continue;
    bool new_place = !place_is_known(w, &sites[i]);
    w->all = realloc(w->all, (w->count + 1) * sizeof *w->all);
    w->all[w->count++] = sites[i];
    s->options.sites = SITES_FAIL;
    s->options.site_path = sites[i].path;
    s->options.site_kind = sites[i].kind;
    outcome_t o = run_child(&s->options, watch, ops, count, false);
    w->failed += shared->site_failed;
    w->places += new_place && shared->site_failed;
    if (o.kind == ENDED_WELL) continue;
    fine = false;
    fprintf(stderr, "when %s() fails that is called at %#llx of %s (with the program: --way %s:%#llx):\n",
            sites[i].function, (unsigned long long)sites[i].place, faults_library(), fault_name(sites[i].kind),
            (unsigned long long)sites[i].path);
    tell_failure(s, shared, &o, ops, count);
  }
  free(sites);
  return fine;
}

int every_way(settings_t *s, watch_t watch) {
  ways_t w = { 0 };
  uint64_t end = s->options.seed + s->seeds;
  bool fine = true;
  for (; s->options.seed < end && (fine || s->options.keep_going); s->options.seed++) {
    s->options.sites = SITES_NOTE;
    outcome_t o = run_child(&s->options, watch, NULL, 0, false);
    uint64_t count;
    op_t *ops = program_of(watch.shared, &s->options, &count);
    if (o.kind == ENDED_WELL) fine &= fail_ways(s, watch, &w, ops, count);
    else fine = false, tell_failure(s, watch.shared, &o, NULL, 0);
    free(ops);
  }
  printf("%u ways in which the library calls the system, %u of them failed once; they begin at %u places\n", w.count,
         w.failed, w.places);
  if (w.places < s->least_places) {
    fprintf(stderr, "tester: %u places, expected %u at least\n", w.places, s->least_places);
    fine = false;
  }
  for (uint32_t i = 0; s->statistics && i < w.count; i++) {
    char command[512];
    printf("%s ", w.all[i].function);
    fflush(stdout);
    snprintf(command, sizeof command, "addr2line -e %s %#llx", faults_library(),
             (unsigned long long)w.all[i].place - 1);
    if (system(command)) printf("%#llx\n", (unsigned long long)w.all[i].place);
  }
  free(w.all);
  return fine ? 0 : 1;
}
