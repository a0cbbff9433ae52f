/* Writes and parses names and numbers of text files; strict, as such files may be damaged or edited by hand.
 * SPDX-License-Identifier: Apache-2.0 */
#include "base/names.h"

#include <string.h>

void gmi_name_write(FILE *file, const char *name) {
  for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
    if (*c > ' ' && *c <= '~' && *c != '%') fputc(*c, file);
    else fprintf(file, "%%%02X", *c);
  }
}

/* Writes the characters that stand for byte c. Returns how many. */
static size_t escape(unsigned char c, char out[3]) {
  static const char digits[] = "0123456789ABCDEF";
  bool control = c < ' ' || c == 0x7f;
  out[0] = control ? '%' : (char)c;
  out[1] = digits[c >> 4];
  out[2] = digits[c & 15];
  return control ? 3 : 1;
}
void gmi_text_escape(char *text_out, size_t size, const char *text) {
  size_t at = 0;
  for (; *text; text++) {
    char out[3];
    size_t length = escape((unsigned char)*text, out);
    if (at + length >= size) break;
    memcpy(text_out + at, out, length);
    at += length;
  }
  text_out[at] = 0;
}
void gmi_name_print(FILE *file, const char *name) {
  for (; *name; name++) {
    char out[3];
    fwrite(out, 1, escape((unsigned char)*name, out), file);
  }
}

bool gmi_name_read(const char *text, char *name_out, size_t size) {
  size_t n = 0;
  for (; *text; text++) {
    unsigned value = (unsigned char)*text;
    if (*text == '%') {
      static const char digits[] = "0123456789abcdef0123456789ABCDEF";
      const char *high = text[1] ? strchr(digits, text[1]) : NULL;
      const char *low = high && text[2] ? strchr(digits, text[2]) : NULL;
      value = low ? (unsigned)((high - digits) % 16 * 16 + (low - digits) % 16) : 0;
      if (!value) return false;
      text += 2;
    } else if (value <= ' ' || value > '~') {
      return false;
    }
    if (n + 1 >= size) return false;
    name_out[n++] = (char)value;
  }
  name_out[n] = 0;
  return n > 0;
}

bool gmi_word_at(const char **at, const char *word) {
  size_t length = strlen(word);
  if (strncmp(*at, word, length) || (*at)[length] != ' ') return false;
  *at += length + 1;
  return true;
}

bool gmi_number_at(const char **at, char end, uint64_t most, uint64_t *value_out) {
  uint64_t value = 0;
  const char *c = *at;
  for (; *c >= '0' && *c <= '9'; c++) {
    uint64_t digit = (uint64_t)(*c - '0');
    if (value > (most - digit) / 10 || digit > most) return false; /* value * 10 + digit would exceed most */
    value = value * 10 + digit;
  }
  if (c == *at || *c != end) return false;
  *at = end ? c + 1 : c;
  *value_out = value;
  return true;
}

bool gmi_numbers_at(const char **at, char end, uint64_t most, uint32_t count, uint64_t *values_out) {
  for (uint32_t i = 0; i < count; i++)
    if (!gmi_number_at(at, i + 1 < count ? ' ' : end, most, &values_out[i])) return false;
  return true;
}
