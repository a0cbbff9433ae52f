/* Names and numbers in text files. Names: every byte outside ! to ~, and %, as %XX. SPDX-License-Identifier:
 * Apache-2.0 */
#ifndef GMI_NAMES_H
#define GMI_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

void gmi_name_write(FILE *file, const char *name);
/* False when text is no such name, is empty, or does not fit. */
bool gmi_name_read(const char *text, char *name_out, size_t size);

/* What scanf() would take is more than a file may have: signs, blanks, numbers that do not fit. */
/* Is this the first word of what is left of a line? Then what is left begins behind it and a space. */
bool gmi_word_at(const char **at, const char *word);
/* The next number, of digits only, which is at most most and followed by end; what is left begins behind that. */
bool gmi_number_at(const char **at, char end, uint64_t most, uint64_t *value_out);
/* So many numbers, separated by single spaces. */
bool gmi_numbers_at(const char **at, char end, uint64_t most, uint32_t count, uint64_t *values_out);

#endif
