/* Limits on memory: cgroups of both versions, the machine, resource limits. SPDX-License-Identifier: Apache-2.0
 *
 * A cgroup is limited by every cgroup above it, so all of them up to the mount point are read. The memory charged to a
 * cgroup includes file cache, which the kernel drops when it needs the memory; that part is not counted as used here,
 * or a process that has read a large file would seem to have no memory left.
 *
 * Some virtual machines receive memory only as it is touched. MemTotal and MemAvailable then cover the part received so
 * far, while the zones already span all of it. But zones much larger than MemTotal can also mean that the host has
 * taken memory away for good. The zones are therefore believed only where a cgroup's limit promises more than MemTotal,
 * too.
 *
 * Runs on the caller's thread, without shared state. */
#include "host/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"

/* ---- files */

/* Reads a whole file, NUL-terminated; free *text_out. NULL: there is no such file, or it may not be read. It is read
 * until its end, as files in /proc report size 0. */
static gemini_status_t file_read(const char *root, const char *path, char **text_out) {
  char full[PATH_MAX];
  int length = snprintf(full, sizeof full, "%s%s", root, path);
  *text_out = NULL;
  if (length < 0 || (size_t)length >= sizeof full) return GEMINI_OK; /* the kernel has no such file either */
  int fd = open(full, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ENOENT || errno == ENOTDIR || errno == EACCES || errno == EPERM) return GEMINI_OK;
    return gmi_fail(GEMINI_ERR_IO, errno, "%s: %s", full, strerror(errno));
  }
  size_t size = 0, capacity = 4096;
  char *text = malloc(capacity);
  gemini_status_t status = GEMINI_OK;
  while (text) {
    ssize_t n = read(fd, text + size, capacity - size - 1);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) break;
    if (n < 0) {
      /* ENODEV: the cgroup was removed between open and read, and so limits nothing. */
      if (errno != ENODEV) status = gmi_fail(GEMINI_ERR_IO, errno, "%s: %s", full, strerror(errno));
      free(text);
      close(fd);
      return status;
    }
    size += (size_t)n;
    if (size + 1 < capacity) continue;
    char *larger = realloc(text, capacity *= 2);
    if (!larger) free(text);
    text = larger;
  }
  close(fd);
  if (!text) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "%s: no memory to read it", full);
  text[size] = 0;
  *text_out = text;
  return GEMINI_OK;
}

/* Removes the first line from *rest and returns it; NULL at the end. */
static char *line_next(char **rest) { return *rest && **rest ? strsep(rest, "\n") : NULL; }

/* Parses "123", "max" or "unlimited", followed by white space or the end. */
static bool number_parse(const char *text, uint64_t *value_out) {
  static const char *const words[] = { "max", "unlimited" };
  text += strspn(text, " \t");
  for (int i = 0; i < 2; i++) {
    size_t length = strlen(words[i]);
    if (!strncmp(text, words[i], length) && strchr(" \t\n", text[length])) {
      *value_out = GMI_LIMIT_NONE;
      return true;
    }
  }
  if (*text < '0' || *text > '9') return false;
  char *end;
  errno = 0;
  uint64_t value = strtoull(text, &end, 10);
  if (errno || !strchr(" \t\n", *end)) return false;
  *value_out = value;
  return true;
}

/* The number after the line's key ("key 12", "key: 12 kB"); false when no line has it. */
static bool field_find(const char *text, const char *key, uint64_t *value_out) {
  size_t length = strlen(key);
  for (const char *line = text; line; line = strchr(line, '\n')) {
    line += *line == '\n';
    if (!strncmp(line, key, length)) return number_parse(line + length, value_out);
  }
  return false;
}

static uint64_t field_or_0(const char *text, const char *key) {
  uint64_t value = 0;
  return text && field_find(text, key, &value) ? value : 0;
}

/* ---- limits */

static const gmi_limit_t no_limit = { GMI_LIMIT_NONE, 0, GMI_LIMIT_NONE, "" };

/* Replaces a limit by another one that leaves fewer free bytes. */
static void limit_narrow(gmi_limit_t *binding, const gmi_limit_t *other) {
  if (other->free_bytes < binding->free_bytes) *binding = *other;
}

static void limit_add(gmi_limit_t *binding, uint64_t limit_bytes, uint64_t used_bytes, const char *what,
                      const char *where) {
  if (limit_bytes == GMI_LIMIT_NONE) return;
  gmi_limit_t one = { limit_bytes, used_bytes, used_bytes < limit_bytes ? limit_bytes - used_bytes : 0, "" };
  if (where) snprintf(one.name, sizeof one.name, "%s of cgroup %s", what, where);
  else snprintf(one.name, sizeof one.name, "%s", what);
  limit_narrow(binding, &one);
}

/* ---- cgroups */

typedef struct {
  const char *limits[2]; /* files with a limit; NULL: none */
  const char *current;
  const char *reclaimable[3]; /* keys of memory.stat; NULL: none */
} cgroup_files_t;

/* memory.high counts as a limit: beyond it the kernel throttles the process until it hardly runs. */
static const cgroup_files_t version2 = { { "memory.max", "memory.high" },
                                         "memory.current",
                                         { "inactive_file ", "active_file ", "slab_reclaimable " } };
static const cgroup_files_t version1 = { { "memory.limit_in_bytes", NULL },
                                         "memory.usage_in_bytes",
                                         { "total_inactive_file ", "total_active_file ", NULL } };

/* The number in a file of a cgroup; false when there is no such file. */
static gemini_status_t cgroup_number(const char *root, const char *directory, const char *name, bool *found_out,
                                     uint64_t *value_out) {
  char path[PATH_MAX];
  char *text = NULL;
  *found_out = false;
  int length = snprintf(path, sizeof path, "%s/%s", directory, name);
  if (length < 0 || (size_t)length >= sizeof path) return GEMINI_OK;
  gemini_status_t status = file_read(root, path, &text);
  if (status || !text) return status;
  *found_out = true;
  if (!number_parse(text, value_out))
    status = gmi_fail(GEMINI_ERR_FORMAT, 0, "%s%s: \"%.40s\" is no number of bytes", root, path, text);
  free(text);
  return status;
}

/* Narrows the binding limit by those of one cgroup. directory: its path without root; name: its name for messages.
 * Usage is read only if there is a limit. */
static gemini_status_t cgroup_read(const char *root, const char *directory, const char *name,
                                   const cgroup_files_t *files, gmi_limit_t *binding) {
  uint64_t used = 0;
  bool used_known = false;
  for (int i = 0; i < 2 && files->limits[i]; i++) {
    uint64_t limit = 0;
    bool found;
    gemini_status_t status = cgroup_number(root, directory, files->limits[i], &found, &limit);
    if (status) return status;
    /* Version 1 expresses "no limit" as the largest multiple of a page. */
    if (!found || limit >= UINT64_C(1) << 62) continue;
    if (!used_known) {
      status = cgroup_number(root, directory, files->current, &used_known, &used);
      if (status) return status;
      char path[PATH_MAX], *stat = NULL;
      int length = snprintf(path, sizeof path, "%s/memory.stat", directory);
      if (length > 0 && (size_t)length < sizeof path) status = file_read(root, path, &stat);
      if (status) return status;
      uint64_t reclaimable = 0;
      for (int k = 0; k < 3 && files->reclaimable[k]; k++) {
        uint64_t part = field_or_0(stat, files->reclaimable[k]);
        reclaimable += part < used - reclaimable ? part : used - reclaimable;
      }
      free(stat);
      used -= reclaimable;
      used_known = true;
    }
    limit_add(binding, limit, used, files->limits[i], *name ? name : "/");
  }
  return GEMINI_OK;
}

/* Decodes the octal escapes of mountinfo (\040 for a space), in place. */
static void octal_decode(char *text) {
  char *to = text;
  for (const char *from = text; *from; to++) {
    if (from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' && from[2] <= '7' && from[3] >= '0' &&
        from[3] <= '7') {
      *to = (char)((from[1] - '0') << 6 | (from[2] - '0') << 3 | (from[3] - '0'));
      from += 4;
    } else {
      *to = *from++;
    }
  }
  *to = 0;
}

/* Does a comma-separated list contain word? */
static bool list_has(const char *list, const char *word) {
  size_t length = strlen(word);
  for (const char *at = list; (at = strstr(at, word)); at += length)
    if ((at == list || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return true;
  return false;
}

/* The part of a cgroup's path below the cgroup that is mounted ("" for that one itself); NULL: it does not lie
 * below. */
static const char *path_below(const char *path, const char *mount_root) {
  size_t length = strcmp(mount_root, "/") ? strlen(mount_root) : 0;
  if (strncmp(path, mount_root, length) || (path[length] != '/' && path[length])) return NULL;
  path += length;
  return strcmp(path, "/") ? path : "";
}

/* Reads the cgroup at path in one mounted hierarchy, and all cgroups above it. */
static gemini_status_t hierarchy_read(const char *root, const char *mount_point, const char *mount_root,
                                      const char *path, const cgroup_files_t *files, gmi_limit_t *binding) {
  char directory[PATH_MAX], full[PATH_MAX];
  /* In a container the path may be the host's, or lead out of the visible hierarchy (/..). The mount point is then the
   * closest cgroup to the process's own that can be read. */
  const char *below = strstr(path, "/..") ? NULL : path_below(path, mount_root);
  int length = snprintf(directory, sizeof directory, "%s%s", mount_point, below ? below : "");
  int full_length = snprintf(full, sizeof full, "%s%s%s", root, mount_point, below ? below : "");
  if (length < 0 || (size_t)length >= sizeof directory || full_length < 0 || (size_t)full_length >= sizeof full ||
      access(full, F_OK))
    snprintf(directory, sizeof directory, "%s", mount_point);
  size_t top = strlen(mount_point);
  for (;;) {
    gemini_status_t status = cgroup_read(root, directory, directory + top, files, binding);
    if (status || strlen(directory) <= top) return status;
    *strrchr(directory, '/') = 0; /* to the parent; longer than the mount point, so there is a slash */
  }
}

static gemini_status_t cgroups_read(const char *root, gmi_limit_t *binding) {
  char *own = NULL, *mounts = NULL, *path1 = NULL, *path2 = NULL;
  gemini_status_t status = file_read(root, "/proc/self/cgroup", &own);
  if (!status) status = file_read(root, "/proc/self/mountinfo", &mounts);
  /* Lines are number:controllers:path; version 2 has the number 0 and no controllers. */
  for (char *rest = own, *line; !status && (line = line_next(&rest));) {
    char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path) continue;
    *controllers++ = 0;
    *path++ = 0;
    if (!strcmp(line, "0") && !*controllers) path2 = path;
    else if (list_has(controllers, "memory")) path1 = path;
  }
  /* number parent device root mount-point options [tags...] - type source super-options */
  for (char *rest = mounts, *line; !status && (line = line_next(&rest));) {
    char *fields[6], *tail = strstr(line, " - ");
    if (!tail) continue;
    *tail = 0;
    tail += 3;
    int count = 0;
    while (count < 6 && (fields[count] = strsep(&line, " "))) count++;
    char *type = strsep(&tail, " ");
    strsep(&tail, " ");
    if (count < 6 || !tail) continue;
    octal_decode(fields[3]);
    octal_decode(fields[4]);
    if (path2 && !strcmp(type, "cgroup2"))
      status = hierarchy_read(root, fields[4], fields[3], path2, &version2, binding);
    else if (path1 && !strcmp(type, "cgroup") && list_has(tail, "memory"))
      status = hierarchy_read(root, fields[4], fields[3], path1, &version1, binding);
  }
  free(own);
  free(mounts);
  return status;
}

/* ---- the machine */

/* The memory that the kernel's zones span, whether the machine has received it or not; 0: unknown. */
static gemini_status_t present_read(const char *root, uint64_t *bytes_out) {
  char *text = NULL;
  *bytes_out = 0;
  gemini_status_t status = file_read(root, "/proc/zoneinfo", &text);
  uint64_t pages = 0;
  for (char *rest = text, *line; !status && (line = line_next(&rest));) {
    uint64_t one;
    line += strspn(line, " ");
    if (!strncmp(line, "present ", 8) && number_parse(line + 8, &one) && one < UINT64_C(1) << 50) pages += one;
  }
  free(text);
  long page_bytes = sysconf(_SC_PAGESIZE);
  if (!status && page_bytes > 0) *bytes_out = pages * (uint64_t)page_bytes;
  return status;
}

static gemini_status_t machine_read(const char *root, uint64_t cgroup_limit_bytes, gmi_limit_t *available_out) {
  char *text = NULL;
  uint64_t total_kib = 0, available_kib = 0, present = 0;
  gemini_status_t status = file_read(root, "/proc/meminfo", &text);
  if (status || !text) return status;
  if (!field_find(text, "MemTotal:", &total_kib) || total_kib > UINT64_MAX >> 11 ||
      (!field_find(text, "MemAvailable:", &available_kib) && !field_find(text, "MemFree:", &available_kib)))
    status = gmi_fail(GEMINI_ERR_FORMAT, 0, "%s/proc/meminfo: has no MemTotal or no MemAvailable", root);
  free(text);
  if (!status) status = present_read(root, &present);
  if (status) return status;
  uint64_t total = total_kib * 1024, used = available_kib < total_kib ? (total_kib - available_kib) * 1024 : 0;
  /* MemTotal lacks what the kernel reserves for itself, which is less than an eighth. Only a larger gap counts. */
  uint64_t much = total + total / 8;
  if (cgroup_limit_bytes != GMI_LIMIT_NONE && cgroup_limit_bytes > much && present > much)
    limit_add(available_out, present, used, "MemAvailable and memory not in MemTotal yet", NULL);
  else limit_add(available_out, total, used, "MemAvailable", NULL);
  return GEMINI_OK;
}

/* ---- resource limits */

/* Adds the soft limit in a line of /proc/self/limits. line_name is the whole name, as names contain spaces. */
static void rlimit_add(gmi_limit_t *binding, const char *limits, const char *line_name, const char *name,
                       uint64_t used_kib) {
  uint64_t limit = GMI_LIMIT_NONE;
  if (limits && field_find(limits, line_name, &limit)) limit_add(binding, limit, used_kib * 1024, name, NULL);
}

static gemini_status_t rlimits_read(const char *root, gmi_limits_t *limits_out) {
  char *limits = NULL, *self = NULL;
  gemini_status_t status = file_read(root, "/proc/self/limits", &limits);
  if (!status) status = file_read(root, "/proc/self/status", &self);
  if (!status) {
    rlimit_add(&limits_out->process, limits, "Max address space ", "RLIMIT_AS", field_or_0(self, "VmSize:"));
    rlimit_add(&limits_out->process, limits, "Max data size ", "RLIMIT_DATA", field_or_0(self, "VmData:"));
    /* With the capability CAP_IPC_LOCK (bit 14) RLIMIT_MEMLOCK does not apply. */
    const char *caps = self ? strstr(self, "\nCapEff:") : NULL;
    if (!caps || !(strtoull(caps + 8, NULL, 16) >> 14 & 1))
      rlimit_add(&limits_out->locked, limits, "Max locked memory ", "RLIMIT_MEMLOCK", field_or_0(self, "VmLck:"));
  }
  free(limits);
  free(self);
  return status;
}

/* ---- */

gemini_status_t gmi_limits_read(const char *root, gmi_limits_t *limits_out) {
  gmi_limits_t l = { no_limit, no_limit, no_limit, no_limit, no_limit };
  gemini_status_t status = cgroups_read(root, &l.cgroup);
  if (!status) status = machine_read(root, l.cgroup.limit_bytes, &l.available);
  if (!status) status = rlimits_read(root, &l);
  if (status) return status;
  limit_narrow(&l.memory, &l.cgroup);
  limit_narrow(&l.memory, &l.available);
  limit_narrow(&l.memory, &l.process);
  *limits_out = l;
  return GEMINI_OK;
}

static gmi_limit_t limit_binding(const gmi_limits_t *limits, bool with_lock) {
  gmi_limit_t binding = limits->memory;
  if (with_lock) limit_narrow(&binding, &limits->locked);
  return binding;
}

uint64_t gmi_limits_default_host_bytes(const gmi_limits_t *limits, bool with_lock) {
  const uint64_t whole = UINT64_C(2) << 20;
  uint64_t bytes = limit_binding(limits, with_lock).free_bytes;
  if (bytes == GMI_LIMIT_NONE) return 0;
  return (bytes - bytes / 5) / whole * whole;
}

gemini_status_t gmi_limits_check(const gmi_limits_t *limits, const char *what, uint64_t asked_bytes, bool with_lock) {
  gmi_limit_t binding = limit_binding(limits, with_lock);
  if (asked_bytes <= binding.free_bytes) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                  "%s is %" PRIu64 ", more than the %" PRIu64
                  " bytes that this process may still take (%s: limit %" PRIu64 ", in use %" PRIu64 ")",
                  what, asked_bytes, binding.free_bytes, binding.name, binding.limit_bytes, binding.used_bytes);
}
