/* Texts for people that public functions write. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_TEXT_H
#define GMI_TEXT_H

#include <stdio.h>

#include "core/manager.h"

/* Lets write() write to a stream of memory, and copies the text to the caller's buffer: as much as fits, with a NUL. */
gemini_status_t gmi_text_out(gmi_manager_t *m, void (*write)(gmi_manager_t *m, FILE *file, void *user), void *user,
                             uint64_t size_bytes, char *text_out, uint64_t *length_out);
void gmi_dump_write(gmi_manager_t *m, FILE *file); /* the text of gemini_manager_dump() */

#endif
