/* Operations as text, and random numbers. SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <stdlib.h>
#include <string.h>

static const struct {
  const char *name;
  uint32_t weight;
  int who;
} table[OP_COUNT] = {
#define X(name, weight, who) { #name, weight, who },
  OPERATIONS(X)
#undef X
};
static const char *const fault_names[FAULT_KINDS] = { "none", "memory", "thread", "file", "ring", "driver" };

const char *op_name(uint8_t code) { return code < OP_COUNT ? table[code].name : "?"; }
int op_who(uint8_t code) { return table[code].who; }
uint32_t op_weight(uint8_t code) { return table[code].weight; }
const char *fault_name(fault_kind_t kind) { return kind < FAULT_KINDS ? fault_names[kind] : "?"; }
int op_code(const char *name) {
  for (int i = 0; i < OP_COUNT; i++)
    if (!strcmp(table[i].name, name)) return i;
  return -1;
}

void op_write(FILE *file, const op_t *op) {
  fprintf(file, "%s t%u m%u r%u c%u", op_name(op->code), op->thread, op->manager, op->round, op->check);
  if (op->fault) fprintf(file, " %s:%u:%u:%u", fault_names[op->fault], op->skip, op->run, op->errors);
  for (uint32_t i = 0; i < op->count; i++) fprintf(file, " %u", op->arg[i]);
  fputc('\n', file);
}

bool op_read(const char *line, op_t *op) {
  char text[1024], *rest;
  memset(op, 0, sizeof *op);
  if (strlen(line) >= sizeof text) return false;
  strcpy(text, line);
  char *word = strtok_r(text, " \n", &rest);
  int code = word ? op_code(word) : -1;
  if (code < 0) return false;
  op->code = (uint8_t)code;
  while ((word = strtok_r(NULL, " \n", &rest))) {
    uint32_t value = (uint32_t)strtoul(word + 1, NULL, 10);
    bool field = word[1] >= '0' && word[1] <= '9'; /* otherwise it is the name of a fault */
    if (field && *word == 't') op->thread = (uint8_t)value;
    else if (field && *word == 'm') op->manager = (uint8_t)value;
    else if (field && *word == 'r') op->round = (uint16_t)value;
    else if (field && *word == 'c') op->check = value;
    else if (strchr(word, ':')) {
      unsigned skip, run, errors;
      char *at = strchr(word, ':');
      *at = 0;
      for (uint8_t k = 0; k < FAULT_KINDS; k++)
        if (!strcmp(word, fault_names[k])) op->fault = k;
      if (!op->fault || sscanf(at + 1, "%u:%u:%u", &skip, &run, &errors) != 3) return false;
      op->skip = (uint16_t)skip, op->run = (uint16_t)run, op->errors = (uint8_t)errors;
    } else if (op->count < OP_ARGS) {
      op->arg[op->count++] = (uint32_t)strtoul(word, NULL, 10);
    } else {
      return false;
    }
  }
  return true;
}

uint64_t random_next(uint64_t *state) {
  uint64_t x = *state;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  *state = x;
  return x * UINT64_C(2685821657736338717);
}
