/* Reads the tester's options. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <getopt.h>
#include <stdio.h>

#include "settings.h"

static const char usage[] =
    "tester [OPTION]...\n"
    "Runs random programs over the public API against a model of it.\n"
    "  --seed N         the first seed (1)\n"
    "  --seeds N        how many (1)\n"
    "  --steps N        operations of a seed's program (10000, or GEMINI_TESTER_STEPS, over the number of seeds)\n"
    "  --threads N      threads, at most 32 (1)\n"
    "  --faults P       per cent of operations during which a call of the system fails (0)\n"
    "  --device D       sim, or cuda over a fake driver (sim)\n"
    "  --no-files       no manager has a file tier\n"
    "  --without LIST   leaves out these operations and features, by name, with commas between; \"help\" names them\n"
    "  --spare LIST     no faults in these operations\n"
    "  --more LIST      these operations ten times as often\n"
    "  --shrink         reduces the program of a seed that fails\n"
    "  --shrink-seconds N  for at most so long (300)\n"
    "  --tries N        runs of each reduced program, until one fails (2; with several threads 10)\n"
    "  --replay FILE    runs a program that was written\n"
    "  --save FILE      writes a program that fails there; with --shrink, otherwise to tester.SEED.program\n"
    "  --all-every N    checks everything after so many operations (512)\n"
    "  --every-way N    every way in which the library calls the system in these programs fails once; an error if\n"
    "                   the ways begin at fewer than N places\n"
    "  --way WAY        this one fails\n"
    "  --keep-going     does not stop at the first seed that fails\n"
    "  --hang N         seconds without progress after which a program hangs (60)\n"
    "  --verbose        tells each operation, and each call of the library with its status\n"
    "  --statistics     prints how often each operation ended how\n"
    "  --in-process     without a child, for a debugger\n";

static const struct {
  const char *name, *words;
} features[] = {
#define X(name, words) { #name, words },
  FEATURES(X)
#undef X
};

__attribute__((noreturn)) static void refuse(const char *what, const char *value) {
  fprintf(stderr, "tester: %s: %s; --help tells\n", what, value);
  exit(2);
}
static uint64_t number(const char *name, const char *text, uint64_t most) {
  char *end;
  uint64_t value = strtoull(text, &end, 10);
  if (!*text || *end || value > most) refuse(name, text);
  return value;
}

static void mark(bool marks[OP_COUNT], const char *option, char *list) {
  for (char *rest, *name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
    if (op_code(name) < 0) refuse(option, name);
    marks[op_code(name)] = true;
  }
}

static void leave_out(options_t *o, char *list) {
  if (!strcmp(list, "help")) {
    for (int i = 0; i < OP_COUNT; i++) printf("%s\n", op_name((uint8_t)i));
    for (int i = 0; i < FEATURE_COUNT; i++) printf("%s: %s\n", features[i].name, features[i].words);
    exit(0);
  }
  for (char *rest, *name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
    int code = op_code(name);
    bool known = code >= 0;
    if (known) o->without[code] = true;
    for (int i = 0; i < FEATURE_COUNT; i++)
      if (!strcmp(name, features[i].name)) o->features_off |= 1u << i, known = true;
    if (!known) refuse("--without", name);
  }
}

static void way_of(settings_t *s, const char *text) {
  const char *colon = strchr(text, ':');
  for (int kind = 1; colon && kind < FAULT_KINDS; kind++)
    if (!strncmp(fault_name((fault_kind_t)kind), text, (size_t)(colon - text))) s->way_kind = (fault_kind_t)kind;
  s->way = colon ? strtoull(colon + 1, NULL, 0) : 0;
  if (!s->way_kind || !s->way) refuse("--way", text);
}

#define OPTIONS(X)                 \
  X(SEED, "seed", 1)               \
  X(SEEDS, "seeds", 1)             \
  X(STEPS, "steps", 1)             \
  X(NTHREADS, "threads", 1)        \
  X(FAULTS, "faults", 1)           \
  X(DEVICE_OPTION, "device", 1)    \
  X(NO_FILES, "no-files", 0)       \
  X(WITHOUT, "without", 1)         \
  X(SPARE, "spare", 1)             \
  X(MORE, "more", 1)               \
  X(SHRINK, "shrink", 0)           \
  X(SHRINK_S, "shrink-seconds", 1) \
  X(TRIES, "tries", 1)             \
  X(REPLAY, "replay", 1)           \
  X(SAVE, "save", 1)               \
  X(ALL_EVERY, "all-every", 1)     \
  X(WAYS, "every-way", 1)          \
  X(WAY, "way", 1)                 \
  X(GOING, "keep-going", 0)        \
  X(HANG, "hang", 1)               \
  X(VERBOSE, "verbose", 0)         \
  X(STATISTICS, "statistics", 0)   \
  X(IN_PROCESS, "in-process", 0)   \
  X(HELP, "help", 0)
enum {
  BEFORE_OPTIONS = 255,
#define X(id, name, has_value) id,
  OPTIONS(X)
#undef X
};

settings_t settings_of(int argc, char **argv) {
  static const struct option options[] = {
#define X(id, name, has_value) { name, has_value, NULL, id },
    OPTIONS(X)
#undef X
        { NULL, 0, NULL, 0 }
  };
  settings_t s = {
    .options = { .seed = 1, .steps = 10000, .threads = 1, .files = true, .hang_s = 60, .all_every = 512 },
    .program = argv[0],
    .seeds = 1,
    .shrink_s = 300
  };
  bool steps_given = false;
  for (int i = 1; i < argc; i++) {
    if (!strncmp(argv[i], "--seed", 6) || !strncmp(argv[i], "--steps", 7)) i++;
    else snprintf(s.arguments + strlen(s.arguments), sizeof s.arguments - strlen(s.arguments), " %s", argv[i]);
  }
  for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
    options_t *o = &s.options;
    switch (c) {
    case SEED: o->seed = number("--seed", optarg, UINT64_MAX); break;
    case SEEDS: s.seeds = number("--seeds", optarg, UINT32_MAX); break;
    case STEPS: o->steps = number("--steps", optarg, UINT32_MAX), steps_given = true; break;
    case NTHREADS: o->threads = (uint32_t)number("--threads", optarg, THREADS); break;
    case FAULTS: o->faults = (uint32_t)number("--faults", optarg, 100); break;
    case DEVICE_OPTION:
      o->cuda = !strcmp(optarg, "cuda");
      if (!o->cuda && strcmp(optarg, "sim")) refuse("--device", optarg);
      break;
    case NO_FILES: o->files = false; break;
    case WITHOUT: leave_out(o, optarg); break;
    case SPARE: mark(o->spared, "--spare", optarg); break;
    case MORE: mark(o->more, "--more", optarg); break;
    case SHRINK: s.shrinks = true; break;
    case SHRINK_S: s.shrink_s = (uint32_t)number("--shrink-seconds", optarg, 1000000); break;
    case TRIES: o->tries = (uint32_t)number("--tries", optarg, 1000); break;
    case REPLAY: s.replay = optarg; break;
    case SAVE: s.save = optarg; break;
    case GOING: o->keep_going = true; break;
    case WAY: way_of(&s, optarg); break;
    case WAYS: s.every_way = true, s.least_places = (uint32_t)number("--every-way", optarg, 100000); break;
    case ALL_EVERY: o->all_every = (uint32_t)number("--all-every", optarg, UINT32_MAX); break;
    case HANG: o->hang_s = (uint32_t)number("--hang", optarg, 1000000); break;
    case VERBOSE: o->verbose = true; break;
    case STATISTICS: s.statistics = true; break;
    case IN_PROCESS: s.in_process = true; break;
    case HELP: fputs(usage, stdout); exit(0);
    default: exit(2);
    }
  }
  if (optind < argc) refuse(argv[optind], "no such argument");
  const char *steps = getenv("GEMINI_TESTER_STEPS");
  if (!steps_given && steps && *steps) s.options.steps = number("GEMINI_TESTER_STEPS", steps, UINT32_MAX);
  if (!steps_given && s.seeds) s.options.steps = (s.options.steps + s.seeds - 1) / s.seeds;
  if (!s.options.threads || !s.seeds || !s.options.all_every) refuse("--threads, --seeds or --all-every", "0");
  return s;
}

op_t *program_read(const char *path, options_t *o, uint64_t *count_out) {
  FILE *file = fopen(path, "r");
  if (!file) refuse(path, "cannot be read");
  uint64_t count = 0, capacity = 0;
  op_t *ops = NULL;
  unsigned threads = 1, cuda = 0, files = 1;
  for (char line[1024]; fgets(line, sizeof line, file);) {
    if (*line == '#') {
      sscanf(line, "# threads %u cuda %u files %u", &threads, &cuda, &files);
      continue;
    }
    if (count == capacity) ops = realloc(ops, (capacity = capacity ? capacity * 2 : 256) * sizeof *ops);
    if (!ops || !op_read(line, &ops[count++])) refuse(path, line);
  }
  fclose(file);
  o->threads = threads && threads <= THREADS ? threads : 1;
  o->cuda = cuda;
  o->files = files;
  *count_out = count;
  return ops;
}
