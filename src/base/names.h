/* Names and numbers in the library's text files. SPDX-License-Identifier: Apache-2.0
 *
 * A name is written with every byte outside the range ! to ~, and %, as %XX, so that it is a single word. Threads:
 * any. */
#ifndef GMI_NAMES_H
#define GMI_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

void gmi_name_write(FILE *file, const char *name);
/* For texts that people read, messages and dumps: copies text with control characters as %XX, so that a name cannot
 * begin a line of its own or steer a terminal. Other bytes, blanks and UTF-8 among them, stay. What does not fit into
 * size bytes is left out. */
void gmi_text_escape(char *text_out, size_t size, const char *text);
void gmi_name_print(FILE *file, const char *name);
/* Decodes a name. False: text is malformed or empty, or the name does not fit into size bytes. */
bool gmi_name_read(const char *text, char *name_out, size_t size);

/* The following parse a line from *at on and advance *at behind what they accept; on false *at stays (except for
 * gmi_numbers_at()). scanf() will not do: it accepts signs, blanks, and numbers that overflow. */
/* Accepts a word and the space behind it. */
bool gmi_word_at(const char **at, const char *word);
/* Accepts a number of digits only, of at most `most`, and the character `end` behind it (0: the end of the line). */
bool gmi_number_at(const char **at, char end, uint64_t most, uint64_t *value_out);
/* Accepts count numbers, separated by single spaces, with `end` behind the last. */
bool gmi_numbers_at(const char **at, char end, uint64_t most, uint32_t count, uint64_t *values_out);

#endif
