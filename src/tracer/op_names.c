/* Names of ops: a hash table with chaining. Called by tracer.c and trace_file.c. SPDX-License-Identifier: Apache-2.0 */
#include "tracer/op_names.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

enum { FIRST_BUCKETS = 256 };

/* A name. Callers hold the address of text; entry_of() finds the entry before it. */
typedef struct entry {
  struct entry *next; /* in the same bucket */
  uint64_t hash, refs;
  char text[];
} entry_t;

/* Invariant: count is the number of entries in all buckets; each has at least one reference. */
struct gmi_op_names {
  entry_t **buckets; /* [bucket_count] */
  uint64_t bucket_count, count;
};

static entry_t *entry_of(const char *name) { return (entry_t *)(uintptr_t)(name - offsetof(entry_t, text)); }

gmi_op_names_t *gmi_op_names_new(void) {
  gmi_op_names_t *n = calloc(1, sizeof *n);
  if (n) n->buckets = calloc(FIRST_BUCKETS, sizeof *n->buckets);
  if (!n || !n->buckets) {
    free(n);
    return NULL;
  }
  n->bucket_count = FIRST_BUCKETS;
  return n;
}

void gmi_op_names_free(gmi_op_names_t *names) {
  if (!names) return;
  for (uint64_t b = 0; b < names->bucket_count; b++) {
    for (entry_t *e = names->buckets[b], *next; e; e = next) {
      next = e->next;
      free(e);
    }
  }
  free(names->buckets);
  free(names);
}

uint64_t gmi_op_names_count(const gmi_op_names_t *names) { return names->count; }

static void grow(gmi_op_names_t *n) { /* without memory the table keeps its size and chains get longer */
  uint64_t count = n->bucket_count * 4;
  entry_t **buckets = calloc(count, sizeof *buckets);
  if (!buckets) return;
  for (uint64_t b = 0; b < n->bucket_count; b++) {
    for (entry_t *e = n->buckets[b], *next; e; e = next) {
      next = e->next;
      e->next = buckets[e->hash % count];
      buckets[e->hash % count] = e;
    }
  }
  free(n->buckets);
  n->buckets = buckets;
  n->bucket_count = count;
}

const char *gmi_op_name_take(gmi_op_names_t *names, const char *text) {
  gmi_op_names_t *n = names;
  uint64_t hash = gmi_hash_text(GMI_HASH_NOTHING, text);
  entry_t *e = n->buckets[hash % n->bucket_count];
  while (e && (e->hash != hash || strcmp(e->text, text))) e = e->next;
  if (!e) {
    size_t bytes = strlen(text) + 1;
    e = malloc(sizeof *e + bytes);
    if (!e) return NULL;
    if (n->count >= n->bucket_count) grow(n);
    *e = (entry_t){ .next = n->buckets[hash % n->bucket_count], .hash = hash };
    memcpy(e->text, text, bytes);
    n->buckets[hash % n->bucket_count] = e;
    n->count++;
  }
  e->refs++;
  return e->text;
}

const char *gmi_op_name_again(const char *name) {
  entry_of(name)->refs++;
  return name;
}

void gmi_op_name_drop(gmi_op_names_t *names, const char *name) {
  entry_t *e = entry_of(name), **link = &names->buckets[e->hash % names->bucket_count];
  if (--e->refs) return;
  while (*link != e) link = &(*link)->next;
  *link = e->next;
  names->count--;
  free(e);
}
