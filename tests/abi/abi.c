/* Checks that public headers, the linker's map and the built library agree with what is written down here.
 * SPDX-License-Identifier: Apache-2.0
 *
 * symbols  functions of the headers, of the map, of symbols.txt and of the built library are the same
 * header   each header alone compiles as C99 and C++11 without a warning or a padded struct, every function is explained
 * layout   sizes, offsets and values of test_layout.c hold, and it knows every struct, field and constant
 * update   writes symbols.txt, test_layout.c and the map anew: only for a release that nobody has yet
 *
 * Exit status: 0 all is well, 1 a check failed, 2 it could not be made. */
#include <ctype.h>
#include <errno.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

#define ENTRIES "/* --- entries --- */\n"

/* The first header names the folder; the others are in it or below it. */
enum { HEADERS = 8 };
static const char *headers[HEADERS];
static size_t header_count;
static const char *map_path, *golden_dir, *library_path, *cc = "cc", *cxx = "c++", *nm = "nm";
static const char *include_dir; /* where gemini.h is, for a header that includes it; NULL */
static const char *node;        /* of the map, in which update puts everything */

static void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
static void die(const char *format, ...) {
  va_list args;
  va_start(args, format);
  fflush(stdout);
  fputs("abi: ", stderr);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  exit(2);
}

/* ---- memory, kept until the end; text that grows; lists of words */
typedef struct block {
  struct block *next;
} block_t;
static block_t *blocks;
static void *keep(size_t bytes) {
  block_t *b = calloc(1, sizeof *b + bytes);
  if (!b) die("no memory");
  b->next = blocks;
  blocks = b;
  return b + 1;
}
static void drop_all(void) {
  for (block_t *next; blocks; blocks = next) {
    next = blocks->next;
    free(blocks);
  }
}

typedef struct {
  char *bytes; /* ends with a NUL */
  size_t size, capacity;
} text_t;
static void add_bytes(text_t *t, const char *bytes, size_t size) {
  if (t->capacity - t->size <= size) { /* the old one is kept, too: small */
    t->capacity = 2 * (t->size + size) + 64;
    char *bigger = keep(t->capacity);
    if (t->size) memcpy(bigger, t->bytes, t->size);
    t->bytes = bigger;
  }
  memcpy(t->bytes + t->size, bytes, size);
  t->bytes[t->size += size] = 0;
}
static void add(text_t *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(text_t *t, const char *format, ...) {
  char line[1024];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(line, sizeof line, format, args);
  va_end(args);
  if (n < 0 || n >= (int)sizeof line) die("a line is longer than %zu bytes: %s", sizeof line, line);
  add_bytes(t, line, (size_t)n);
}

typedef struct {
  char **word;
  size_t count, capacity;
} list_t;
static void push(list_t *l, const char *bytes, size_t size) {
  if (l->count == l->capacity) {
    l->capacity = l->capacity ? 2 * l->capacity : 64;
    char **more = keep(l->capacity * sizeof *more);
    if (l->count) memcpy(more, l->word, l->count * sizeof *more);
    l->word = more;
  }
  char *word = keep(size + 1);
  memcpy(word, bytes, size);
  l->word[l->count++] = word;
}
static void push_word(list_t *l, const char *word) { push(l, word, strlen(word)); }
static bool has(const list_t *l, const char *word) {
  for (size_t i = 0; i < l->count; i++)
    if (!strcmp(l->word[i], word)) return true;
  return false;
}
static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static void sort(list_t *l) {
  if (l->count) qsort(l->word, l->count, sizeof *l->word, by_name);
}

/* ---- files and programs */
static text_t read_stream(FILE *file, const char *what) {
  text_t t = { 0 };
  char part[4096];
  size_t n;
  add_bytes(&t, "", 0);
  while ((n = fread(part, 1, sizeof part, file))) add_bytes(&t, part, n);
  if (ferror(file)) die("%s: %s", what, strerror(errno));
  fclose(file);
  if (strlen(t.bytes) != t.size) die("%s: holds a zero byte", what);
  return t;
}
static text_t read_file(const char *path) {
  FILE *file = fopen(path, "r");
  if (!file) die("%s: %s", path, strerror(errno));
  return read_stream(file, path);
}
static void write_file(const char *path, const text_t *t) {
  FILE *file = fopen(path, "w");
  if (!file || fwrite(t->bytes, 1, t->size, file) != t->size || fclose(file)) die("%s: %s", path, strerror(errno));
}
static const char *golden(const char *name) {
  text_t path = { 0 };
  add(&path, "%s/%s", golden_dir, name);
  return path.bytes;
}

/* Runs a program; its output is in output, with its errors unless they go where ours go. */
static bool run(char *const argv[], bool with_errors, text_t *output) {
  int ends[2];
  pid_t child;
  posix_spawn_file_actions_t actions;
  fflush(NULL);
  if (pipe(ends)) die("pipe: %s", strerror(errno));
  int error = posix_spawn_file_actions_init(&actions);
  if (!error) error = posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  if (!error && with_errors) error = posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  if (!error) error = posix_spawn_file_actions_addclose(&actions, ends[0]);
  if (!error) error = posix_spawnp(&child, argv[0], &actions, NULL, argv, environ);
  if (error) die("%s: cannot be run: %s", argv[0], strerror(error));
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  FILE *file = fdopen(ends[0], "r");
  if (!file) die("%s: %s", argv[0], strerror(errno));
  *output = read_stream(file, argv[0]);
  int status;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) die("%s: %s", argv[0], strerror(errno));
  return WIFEXITED(status) && !WEXITSTATUS(status);
}

static char scratch[256]; /* a folder; "" = not made */
static const char *const scratch_names[] = { "source.c", "object.o", "program" };
enum { SCRATCH_SOURCE, SCRATCH_OBJECT, SCRATCH_PROGRAM, SCRATCH_NAMES };
static char *scratch_file(int which) {
  if (!*scratch) {
    const char *tmp = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%.200s/abi.XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(scratch)) die("%s: %s", scratch, strerror(errno));
  }
  text_t path = { 0 };
  add(&path, "%s/%s", scratch, scratch_names[which]);
  return path.bytes;
}
static void end(void) {
  for (int i = 0; *scratch && i < SCRATCH_NAMES; i++) unlink(scratch_file(i));
  if (*scratch) rmdir(scratch);
  drop_all();
}

/* The folder of the first header, with its slash, has so many characters. */
static size_t folder_length(void) {
  const char *slash = strrchr(headers[0], '/');
  return slash ? (size_t)(slash + 1 - headers[0]) : 0;
}
/* As programs include it. */
static const char *header_name(size_t i) {
  size_t n = folder_length();
  if (strncmp(headers[i], headers[0], n) != 0) die("%s is not below the folder of %s", headers[i], headers[0]);
  return headers[i] + n;
}
static void add_includes(text_t *source) {
  for (size_t i = 0; i < header_count; i++) add(source, "#include \"%s\"\n", header_name(i));
}

/* Compiles source beside the header with the words of options; prints what was wrong. false: it does not compile. */
static bool compiles(const char *compiler, const char *options, const text_t *source, int output) {
  list_t l = { 0 };
  text_t said, dir = { 0 };
  add(&dir, "%.*s.", (int)folder_length(), headers[0]);
  push_word(&l, compiler);
  while (*options) {
    size_t n = strcspn(options, " ");
    push(&l, options, n);
    options += n + strspn(options + n, " ");
  }
  push_word(&l, "-I"), push_word(&l, dir.bytes);
  if (include_dir) push_word(&l, "-I"), push_word(&l, include_dir);
  if (output == SCRATCH_OBJECT) push_word(&l, "-c");
  push_word(&l, scratch_file(SCRATCH_SOURCE)), push_word(&l, "-o"), push_word(&l, scratch_file(output));
  write_file(scratch_file(SCRATCH_SOURCE), source);
  char **argv = keep((l.count + 1) * sizeof *argv);
  memcpy(argv, l.word, l.count * sizeof *argv);
  if (run(argv, true, &said)) return true;
  for (size_t i = 0; i < l.count; i++) printf("%s ", l.word[i]);
  printf("\n%s", said.bytes);
  return false;
}

/* ---- C, as plain as the header's and the map's */

/* Comments become spaces, so that places stay what they are. */
static text_t without_comments(const text_t *t) {
  text_t plain = { 0 };
  add_bytes(&plain, t->bytes, t->size);
  for (char *at = plain.bytes; (at = strstr(at, "/*"));) {
    char *stop = strstr(at + 2, "*/");
    if (!stop) die("a comment does not end: %.40s", at);
    for (stop += 2; at < stop; at++) *at = ' ';
  }
  return plain;
}

static bool is_word(char c) { return isalnum((unsigned char)c) || c == '_'; }

/* Names of #define; then directives become spaces. Includes, too, are asked of the text with its comments. */
static void take_directives(text_t *plain, list_t *macros) {
  for (char *at = plain->bytes; (at = strstr(at, "\\\n"));) at[0] = at[1] = ' ';
  for (char *line = plain->bytes, *next; *line; line = next) {
    char *stop = strchr(line, '\n'), *at = line + strspn(line, " \t");
    next = stop ? stop + 1 : line + strlen(line);
    if (*at != '#') continue;
    at += 1 + strspn(at + 1, " \t");
    if (!strncmp(at, "define", 6) && strchr(" \t", at[6])) {
      at += 6 + strspn(at + 6, " \t");
      size_t n = 0;
      while (is_word(at[n])) n++;
      push(macros, at, n);
    }
    memset(line, ' ', (size_t)((stop ? stop : next) - line));
  }
}

typedef struct {
  const char *at; /* in the plain text */
  size_t size;
} token_t;
static token_t token_next(const char *at) {
  at += strspn(at, " \t\n");
  token_t t = { at, *at ? 1 : 0 };
  if (is_word(*at))
    while (is_word(at[t.size])) t.size++;
  return t;
}
static token_t after(token_t t) { return token_next(t.at + t.size); }
static bool is(token_t t, const char *text) { return t.size == strlen(text) && !memcmp(t.at, text, t.size); }
static bool is_name(token_t t) { return t.size && is_word(*t.at) && !isdigit((unsigned char)*t.at); }
static char *word_of(token_t t) {
  char *word = keep(t.size + 1);
  return memcpy(word, t.at, t.size);
}

/* ---- what the header declares; its structs and unions are not nested and hold no pointers to functions but by typedefs */
typedef struct {
  char *name;
  list_t fields;
} struct_t;
typedef struct {
  text_t text;
  list_t macros, exported, functions, undocumented, constants;
  struct_t structs[256];
  size_t struct_count;
} header_t;

static void read_struct(header_t *h, token_t t) { /* at its tag */
  char *tag = word_of(t);
  size_t length = strlen(tag);
  if (h->struct_count == sizeof h->structs / sizeof *h->structs) die("more than %zu structs", h->struct_count);
  struct_t *s = &h->structs[h->struct_count++];
  int brackets = 0;
  token_t name = { 0 };
  for (t = after(after(t)); !is(t, "}"); t = after(t)) {
    if (!t.size || is(t, "{") || is(t, "(")) die("struct %s: what is '%.*s'?", tag, (int)t.size, t.at);
    if (is(t, "]")) brackets--;
    if (is_name(t) && !brackets) name = t;
    if (is(t, "[")) brackets++;
    if (!is(t, ",") && !is(t, ";")) continue;
    if (!name.size) die("struct %s: a field without a name", tag);
    push(&s->fields, name.at, name.size);
    name.size = 0;
  }
  s->name = word_of(after(t));
  /* A tag may end in _s where a function has the plain name. */
  if (length > 2 && !strcmp(tag + length - 2, "_s")) length -= 2;
  if (strncmp(s->name, tag, length) || strcmp(s->name + length, "_t"))
    die("struct %s is called %s, not %.*s_t", tag, s->name, (int)length, tag);
}

static void read_enum(header_t *h, token_t t) { /* at its brace */
  for (t = after(t); !is(t, "}"); t = after(t)) {
    if (!is_name(t)) die("a constant is called '%.*s'", (int)t.size, t.at);
    push(&h->constants, t.at, t.size);
    while (t.size && !is(t, ",") && !is(after(t), "}")) t = after(t);
  }
}

/* Does the declaration at this place come right after a comment that begins with two stars and says Since? */
static bool is_documented(const header_t *h, size_t place) {
  const char *text = h->text.bytes;
  while (place && isspace((unsigned char)text[place - 1])) place--;
  if (place < 5 || memcmp(text + place - 2, "*/", 2)) return false;
  size_t begin = place - 2;
  while (begin && memcmp(text + begin, "/*", 2)) begin--;
  text_t comment = { 0 };
  add_bytes(&comment, text + begin, place - begin);
  return !strncmp(comment.bytes, "/**", 3) && strstr(comment.bytes, "Since:");
}

static header_t *read_header(void) {
  header_t *h = keep(sizeof *h);
  for (size_t i = 0; i < header_count; i++) {
    text_t text = read_file(headers[i]);
    add_bytes(&h->text, text.bytes, text.size);
  }
  text_t plain = without_comments(&h->text);
  take_directives(&plain, &h->macros);
  list_t named = { 0 }, inlines = { 0 };
  for (token_t t = token_next(plain.bytes); t.size; t = after(t)) {
    token_t next = after(t);
    /* A name before a parenthesis is a function, unless it is what a pointer to one returns: those are in "(*name)". */
    if (!strncmp(t.at, "gemini_", 7) && is(next, "(") && !is(after(next), "*")) push(&named, t.at, t.size);
    if (is(t, "GEMINI_API")) {
      token_t name = next;
      while (name.size && !is(name, ";") && !(is_name(name) && is(after(name), "("))) name = after(name);
      if (!is_name(name)) die("GEMINI_API before something that is no function: %.60s", t.at);
      push(&h->exported, name.at, name.size);
      if (!is_documented(h, (size_t)(t.at - plain.bytes))) push(&h->undocumented, name.at, name.size);
    }
    /* Functions of the header's own, which the library does not export. */
    if (is(t, "static") && is(next, "inline")) {
      token_t name = next;
      while (name.size && !(is_name(name) && is(after(name), "("))) name = after(name);
      push(&inlines, name.at, name.size);
      if (!is_documented(h, (size_t)(t.at - plain.bytes))) push(&h->undocumented, name.at, name.size);
    }
    if (is(t, "typedef") && (is(next, "struct") || is(next, "union")) && is(after(after(next)), "{"))
      read_struct(h, after(next));
    if (is(t, "enum") && is(next, "{")) read_enum(h, next);
    if (is(t, "enum") && is(after(next), "{")) read_enum(h, after(next));
  }
  sort(&named);
  for (size_t i = 0; i < named.count; i++)
    if ((!i || strcmp(named.word[i - 1], named.word[i])) && !has(&inlines, named.word[i]))
      push_word(&h->functions, named.word[i]);
  sort(&h->exported);
  if (!h->functions.count || !h->struct_count || !h->constants.count)
    die("%s: found no functions, structs or constants", headers[0]);
  return h;
}

/* ---- checks; each returns true when something is wrong, and has said what */

/* Prints how two lists differ. */
static bool differ(const char *what, const list_t *have, const list_t *want) {
  list_t lines = { 0 };
  for (size_t i = 0; i < want->count; i++)
    if (!has(have, want->word[i])) push_word(&lines, "missing"), push_word(&lines, want->word[i]);
  for (size_t i = 0; i < have->count; i++) {
    bool twice = false;
    for (size_t k = 0; k < i; k++) twice |= !strcmp(have->word[k], have->word[i]);
    if (twice || !has(want, have->word[i]))
      push_word(&lines, twice ? "twice" : "unexpected"), push_word(&lines, have->word[i]);
  }
  if (lines.count) printf("%s:\n", what);
  for (size_t i = 0; i < lines.count; i += 2) printf("  %s: %s\n", lines.word[i], lines.word[i + 1]);
  return lines.count;
}

/* "function node" for each function that the map exports. */
static list_t map_symbols(void) {
  list_t symbols = { 0 };
  text_t map = read_file(map_path), plain = without_comments(&map);
  for (char *at = plain.bytes, *open; (open = strchr(at, '{'));) {
    char *stop = strchr(open, '}'), *name = open;
    if (!stop) die("%s: a node does not end", map_path);
    while (name > at && isspace((unsigned char)name[-1])) *--name = 0;
    while (name > at && (is_word(name[-1]) || name[-1] == '.')) name--;
    if (!*name || name == open) die("%s: a node without a name", map_path);
    *stop = 0;
    char *local = strstr(open + 1, "local:"), *global = strstr(open + 1, "global:");
    if (local) *local = 0;
    if (global && *global) memset(global, ' ', strlen("global:"));
    for (char *rest = open + 1, *part; (part = strsep(&rest, ";"));) {
      part += strspn(part, " \t\n");
      size_t n = strcspn(part, " \t\n");
      if (!n) continue;
      if (part[n + strspn(part + n, " \t\n")]) die("%s: two names without a ; between: %s", map_path, part);
      text_t symbol = { 0 };
      add(&symbol, "%.*s %s", (int)n, part, name);
      push_word(&symbols, symbol.bytes);
    }
    at = stop + 1;
  }
  return symbols;
}

/* "function node" for each dynamic symbol that the library defines. */
static list_t library_symbols(void) {
  list_t symbols = { 0 };
  text_t said;
  if (!library_path) die("--library is missing");
  char *argv[] = { (char *)nm, "-D", "--defined-only", (char *)library_path, NULL };
  if (!run(argv, false, &said)) die("%s -D --defined-only %s failed", nm, library_path);
  for (char *rest = said.bytes, *line; (line = strsep(&rest, "\n"));) {
    char kind, name[512];
    if (!*line) continue;
    if (sscanf(line, "%*x %c %511s", &kind, name) != 2) die("%s says '%s'", nm, line);
    if (kind == 'A' && !strncmp(name, "GEMINI_", 7)) continue; /* the node itself */
    char *at = strchr(name, '@');
    const char *of = at ? at + 1 + (at[1] == '@') : "";
    if (at) *at = 0;
    text_t symbol = { 0 };
    add(&symbol, kind == 'T' ? "%s %s" : "%s %s of kind %c", name, of, kind);
    push_word(&symbols, symbol.bytes);
  }
  return symbols;
}

static bool check_symbols(const header_t *h) {
  list_t lines = { 0 }, names = { 0 };
  text_t text = read_file(golden("symbols.txt"));
  for (char *rest = text.bytes, *line; (line = strsep(&rest, "\n"));) {
    if (!*line || *line == '#') continue;
    push_word(&lines, line);
    push(&names, line, strcspn(line, " "));
  }
  list_t map = map_symbols(), library = library_symbols();
  bool bad = differ("symbols.txt", &lines, &lines);
  bad |= differ("functions declared with GEMINI_API, against symbols.txt", &h->exported, &names);
  bad |= differ("functions declared at all, against symbols.txt", &h->functions, &names);
  bad |= differ("exports of the map, against symbols.txt", &map, &lines);
  bad |= differ("exports of the library, against symbols.txt", &library, &lines);
  for (size_t i = 0; i < map.count; i++) {
    if (!strpbrk(map.word[i], "*?[")) continue;
    printf("the map exports by pattern: %s\n", map.word[i]);
    bad = true;
  }
  return bad;
}

/* The headers' includes, in comments, too. */
static bool includes_more(const text_t *text) {
  bool more = false;
  for (const char *at = text->bytes; (at = strchr(at, '#'));) {
    at += 1 + strspn(at + 1, " \t");
    if (strncmp(at, "include", 7)) continue;
    at += 7 + strspn(at + 7, " \t");
    size_t n = *at ? strcspn(at + 1, ">\"\n") : 0;
    if (!strncmp(at, "<stddef.h>", 10) || !strncmp(at, "<stdint.h>", 10)) continue;
    if (!strncmp(at, "<gemini.h>", 10) || (include_dir && !strncmp(at, "\"gemini.h\"", 10))) continue;
    printf("a header includes more than it may: %.*s\n", (int)n, at + 1);
    more = true;
  }
  return more;
}

static bool check_header(const header_t *h) {
  /* Every struct, with the macro that initialises it, and every function are used once; twice included. */
  text_t source = { 0 };
  add_includes(&source), add_includes(&source);
  add(&source, "int use(const void *bytes);\nint use_all(void);\n");
  add(&source, "int use_all(void) {\n  int sum = 0;\n");
  for (size_t i = 0; i < h->struct_count; i++) {
    const char *name = h->structs[i].name;
    text_t macro = { 0 };
    add(&macro, "%.*s_INIT", (int)strlen(name) - 2, name);
    for (char *c = macro.bytes; *c; c++) *c = (char)toupper((unsigned char)*c);
    bool found = has(&h->macros, macro.bytes);
    add(&source, "  %s value_%zu%s%s;\n  sum += use(&value_%zu);\n", name, i, found ? " = " : "",
        found ? macro.bytes : "", i);
  }
  /* The comparison with 0 is what uses a function. */
  for (size_t i = 0; i < h->functions.count; i++) add(&source, "  sum += %s == 0;\n", h->functions.word[i]);
  add(&source, "  return sum;\n}\n");
#define STRICT "-Wall -Wextra -pedantic -Wpadded -Wundef -Werror -Wno-address -O1"
  bool bad = !compiles(cc, "-std=c99 -Wstrict-prototypes " STRICT, &source, SCRATCH_OBJECT);
  bad |= !compiles(cxx, "-x c++ -std=c++11 " STRICT, &source, SCRATCH_OBJECT);
  for (size_t i = 0; header_count > 1 && i < header_count; i++) {
    text_t alone = { 0 };
    add(&alone, "#include \"%s\"\nint none;\n", header_name(i));
    bad |= !compiles(cc, "-std=c99 -Wstrict-prototypes " STRICT, &alone, SCRATCH_OBJECT);
    bad |= !compiles(cxx, "-x c++ -std=c++11 " STRICT, &alone, SCRATCH_OBJECT);
  }
  bad |= includes_more(&h->text);
  for (size_t i = 0; i < h->undocumented.count; i++)
    printf("%s: no /** comment with 'Since:' right before it\n", h->undocumented.word[i]);
  return bad || h->undocumented.count;
}

/* Calls fn for each entry that test_layout.c should have; field is NULL but for OFFSET. */
typedef void (*entry_fn)(void *user, const char *kind, const char *name, const char *field);
static void each_entry(const header_t *h, entry_fn fn, void *user) {
  for (size_t i = 0; i < h->struct_count; i++) {
    const struct_t *s = &h->structs[i];
    fn(user, "SIZE", s->name, NULL);
    for (size_t k = 0; k < s->fields.count; k++) fn(user, "OFFSET", s->name, s->fields.word[k]);
  }
  for (size_t i = 0; i < h->constants.count; i++) fn(user, "VALUE", h->constants.word[i], NULL);
}

static void list_entry(void *user, const char *kind, const char *name, const char *field) {
  text_t entry = { 0 };
  add(&entry, "%s, %s%s%s", kind, name, field ? ", " : "", field ? field : "");
  push_word(user, entry.bytes);
}

static bool check_layout(const header_t *h) {
  text_t text = read_file(golden("test_layout.c")), copy = { 0 };
  list_t have = { 0 }, want = { 0 };
  add_bytes(&copy, text.bytes, text.size);
  for (char *rest = copy.bytes, *line; (line = strsep(&rest, "\n"));) {
    token_t kind = token_next(line), name = after(after(kind)), field = after(after(name));
    bool offset = is(kind, "OFFSET");
    if (kind.at != line || (!offset && !is(kind, "SIZE") && !is(kind, "VALUE")) || !is(after(kind), "(")) continue;
    list_entry(&have, word_of(kind), word_of(name), offset ? word_of(field) : NULL);
  }
  each_entry(h, list_entry, &want);
  bool bad = differ("entries of test_layout.c, against the header", &have, &want);
  bad |= !compiles(cc, "-std=c11 -Wall -Wextra -Werror -O1", &text, SCRATCH_OBJECT);
  bad |= !compiles(cxx, "-x c++ -std=c++11 -Wall -Wextra -Werror -O1", &text, SCRATCH_OBJECT);
  return bad;
}

/* ---- update */
static void probe_entry(void *user, const char *kind, const char *name, const char *field) {
  add(user, "  printf(\"%%lld\\n\", (long long)(");
  if (field) add(user, "offsetof(%s, %s)", name, field);
  else if (*kind == 'S') add(user, "sizeof(%s)", name);
  else add(user, "%s", name);
  add(user, "));\n");
}
typedef struct {
  text_t layout;
  char *values; /* what the probe printed, from the next entry on */
  const char *first_constant;
} update_t;
static void write_entry(void *user, const char *kind, const char *name, const char *field) {
  update_t *u = user;
  char *value = strsep(&u->values, "\n");
  if (!value || !*value) die("the probe said nothing of %s", name);
  if (*kind == 'S' || (*kind == 'V' && !strcmp(name, u->first_constant))) add(&u->layout, "\n");
  add(&u->layout, "%s(%s, %s%s%s);\n", kind, name, field ? field : "", field ? ", " : "", value);
}

static bool update(const header_t *h) {
  if (!node) die("--node is missing");
  text_t symbols = { 0 }, map = { 0 }, probe = { 0 }, said, old = read_file(golden("test_layout.c"));
  add(&symbols,
      "# Functions that the shared library exports, and since which version. Entries are added, never changed.\n");
  add(&map,
      "/* Symbols that the shared library exports; a new release gets a new node. SPDX-License-Identifier: Apache-2.0 "
      "*/\n%s {\n  global:\n",
      node);
  for (size_t i = 0; i < h->functions.count; i++) {
    add(&symbols, "%s %s\n", h->functions.word[i], node);
    add(&map, "    %s;\n", h->functions.word[i]);
  }
  add(&map, "  local:\n    *;\n};\n");

  add(&probe, "#include <stdio.h>\n");
  add_includes(&probe);
  add(&probe, "int main(void) {\n");
  each_entry(h, probe_entry, &probe);
  add(&probe, "  return 0;\n}\n");
  if (!compiles(cc, "-Wall", &probe, SCRATCH_PROGRAM)) return true;
  char *argv[] = { scratch_file(SCRATCH_PROGRAM), NULL };
  if (!run(argv, false, &said)) die("the probe failed");
  char *entries = strstr(old.bytes, ENTRIES);
  if (!entries) die("%s: no line " ENTRIES, golden("test_layout.c"));
  update_t u = { .values = said.bytes, .first_constant = h->constants.word[0] };
  add_bytes(&u.layout, old.bytes, (size_t)(entries - old.bytes) + strlen(ENTRIES));
  each_entry(h, write_entry, &u);

  write_file(golden("symbols.txt"), &symbols);
  write_file(map_path, &map);
  write_file(golden("test_layout.c"), &u.layout);
  return false;
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    bool (*fn)(const header_t *h);
  } commands[] = {
    { "symbols", check_symbols }, { "header", check_header }, { "layout", check_layout }, { "update", update }
  };
  static const struct {
    const char *name;
    const char **value;
  } options[] = { { "--map", &map_path },
                  { "--golden", &golden_dir },
                  { "--library", &library_path },
                  { "--include", &include_dir },
                  { "--node", &node },
                  { "--cc", &cc },
                  { "--cxx", &cxx },
                  { "--nm", &nm } };
  bool (*fn)(const header_t *h) = NULL;
  atexit(end);
  for (int i = 1; i < argc; i++) {
    bool known = false;
    if (!strcmp(argv[i], "--header") && i + 1 < argc && header_count < HEADERS) {
      headers[header_count++] = argv[++i];
      known = true;
    }
    for (size_t k = 0; k < sizeof options / sizeof *options && i + 1 < argc; k++) {
      if (known || strcmp(argv[i], options[k].name)) continue;
      *options[k].value = argv[++i];
      known = true;
    }
    for (size_t k = 0; !known && !fn && k < sizeof commands / sizeof *commands; k++) {
      if (strcmp(argv[i], commands[k].name)) continue;
      fn = commands[k].fn;
      known = true;
    }
    if (!known) die("%s: unknown, or without its value", argv[i]);
  }
  if (!fn || !header_count || !map_path || !golden_dir)
    die("usage: abi symbols|header|layout|update --header HEADER... --map MAP --golden FOLDER [--library LIBRARY]\n"
        "  [--include FOLDER] [--node NODE] [--cc COMPILER] [--cxx COMPILER] [--nm NM]\n"
        "  The golden folder has symbols.txt and test_layout.c; symbols needs the library, update the map's node;\n"
        "  a header that includes gemini.h needs the folder where that is");
  return fn(read_header());
}
