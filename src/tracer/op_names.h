/* Names of operators: each text is kept once, and for as long as a trace has it. SPDX-License-Identifier: Apache-2.0
 *
 * A name is told by its address: two are the same if and only if their addresses are. Guarded by the manager's lock. */
#ifndef GMI_OP_NAMES_H
#define GMI_OP_NAMES_H

#include <stdint.h>

typedef struct gmi_op_names gmi_op_names_t;

gmi_op_names_t *gmi_op_names_new(void);        /* NULL: no memory */
void gmi_op_names_free(gmi_op_names_t *names); /* NULL is accepted; all names end */
uint64_t gmi_op_names_count(const gmi_op_names_t *names);
/* The name of this text, kept until it has been dropped as often as it was taken. NULL: no memory. */
const char *gmi_op_name_take(gmi_op_names_t *names, const char *text);
const char *gmi_op_name_again(const char *name); /* takes a name that is kept */
void gmi_op_name_drop(gmi_op_names_t *names, const char *name);

#endif
