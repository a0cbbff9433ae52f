/* Names of ops: every distinct text is stored once and counted by references. SPDX-License-Identifier: Apache-2.0
 *
 * Two names are equal if and only if their addresses are equal, so comparing ops costs one comparison of pointers.
 * Guarded by the manager's lock. */
#ifndef GMI_OP_NAMES_H
#define GMI_OP_NAMES_H

#include <stdint.h>

typedef struct gmi_op_names gmi_op_names_t;

gmi_op_names_t *gmi_op_names_new(void);        /* NULL: no memory */
void gmi_op_names_free(gmi_op_names_t *names); /* NULL is accepted; frees all names, whatever their references */
uint64_t gmi_op_names_count(const gmi_op_names_t *names);
/* Returns the name with this text and takes a reference; gmi_op_name_drop() gives it back. NULL: no memory. */
const char *gmi_op_name_take(gmi_op_names_t *names, const char *text);
const char *gmi_op_name_again(const char *name); /* takes another reference to a name */
void gmi_op_name_drop(gmi_op_names_t *names, const char *name);

#endif
