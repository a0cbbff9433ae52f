/* The tester's program. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "settings.h"

static void tell_statistics(const shared_t *s) {
  printf("chunks got another size %llu times, and %llu times while other threads ran\n",
         (unsigned long long)s->recuts[0], (unsigned long long)s->recuts[1]);
  for (int i = 0; i < OP_COUNT; i++) {
    bool any = false;
    for (int k = 0; k < 16; k++) any |= s->statuses[i][k] > 0;
    if (!any) {
      printf("%-18s never called\n", op_name((uint8_t)i));
      continue;
    }
    printf("%-18s", op_name((uint8_t)i));
    for (int k = 0; k < 16; k++)
      if (s->statuses[i][k]) printf("  %s %llu", gemini_status_string(-k), (unsigned long long)s->statuses[i][k]);
    printf("\n");
  }
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "--child")) return child_main(atoi(argv[2]));
  settings_t s = settings_of(argc, argv);
  uint64_t count = 0, failed = 0;
  op_t *ops = s.replay ? program_read(s.replay, &s.options, &count) : NULL;
  watch_t watch = watch_new(s.options.threads, (s.replay ? count : s.options.steps) + 4096);
  shared_t *shared = watch.shared;
  if (s.way) {
    s.options.sites = SITES_FAIL;
    s.options.site_path = s.way;
    s.options.site_kind = s.way_kind;
  }
  uint64_t begin = now_ns(), first = s.options.seed, seed = first;
  if (s.in_process) {
    shared->options = s.options;
    shared->replays = ops != NULL;
    shared->replay_count = count;
    if (ops) memcpy(shared_program(shared), ops, count * sizeof *ops);
    snprintf(shared->directory, sizeof shared->directory, "/tmp/gemini-tester-in-process");
    if (system("rm -rf /tmp/gemini-tester-in-process; mkdir /tmp/gemini-tester-in-process")) return 2;
    return child_main(watch.fd);
  }
  if (s.every_way) return every_way(&s, watch);
  for (; seed < first + s.seeds; seed++) {
    s.options.seed = seed;
    outcome_t o = run_child(&s.options, watch, ops, count, false);
    if (o.kind == ENDED_WELL) continue;
    failed++;
    tell_failure(&s, shared, &o, ops, count);
    if (!s.options.keep_going) {
      seed++;
      break;
    }
  }
  double seconds = (double)(now_ns() - begin) * 1e-9;
  printf("%llu seeds, %llu failed, %llu steps, %.0f steps/s; %llu bytes compared, %llu checks had no room\n",
         (unsigned long long)(seed - first), (unsigned long long)failed, (unsigned long long)shared->steps,
         (double)shared->steps / seconds, (unsigned long long)shared->bytes_checked,
         (unsigned long long)shared->unread);
  if (s.options.faults)
    printf("calls with faults: %llu of memory, %llu of threads, %llu of files, %llu of rings, %llu of the driver\n",
           (unsigned long long)shared->faults_hit[FAULT_MEMORY], (unsigned long long)shared->faults_hit[FAULT_THREAD],
           (unsigned long long)shared->faults_hit[FAULT_FILE], (unsigned long long)shared->faults_hit[FAULT_RING],
           (unsigned long long)shared->faults_hit[FAULT_DRIVER]);
  if (s.statistics) tell_statistics(shared);
  free(ops);
  return failed ? 1 : 0;
}
