/* Opens shared libraries at run time. SPDX-License-Identifier: Apache-2.0 */
#include "base/library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fork.h"
#include "base/status.h"

/* Guards the last fields of all libraries. Taken around fork(), so that a child never inherits it locked. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void fork_prepare(void) { pthread_mutex_lock(&lock); }
static void fork_parent(void) { pthread_mutex_unlock(&lock); }
static void fork_child(void) { pthread_mutex_init(&lock, NULL); }
static const gmi_fork_ops_t fork_ops = { fork_prepare, fork_parent, fork_child };

bool gmi_library_function(const gmi_library_t *library, const char *name, void *function_out) {
  void *address = library->replacement ? library->replacement(name) : dlsym(library->handle, name);
  /* dlsym() returns an object pointer. ISO C has no cast from that to a function pointer; POSIX allows copying it. */
  memcpy(function_out, &address, sizeof address);
  return address != NULL;
}

/* Called with lock held. */
static bool load(gmi_library_t *library) {
  if (!library->replacement && !library->handle) {
    char path[4096];
    const char *file = library->file, *folder = library->folder ? getenv(library->folder) : NULL;
    int flags = RTLD_NOW | RTLD_LOCAL;
    if (folder && *folder) {
      snprintf(path, sizeof path, "%s/%s", folder, library->file);
      file = path;
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
      flags |= RTLD_DEEPBIND; /* another version of it may be in the process: each calls its own functions */
#endif
    }
    library->handle = dlopen(file, flags);
    if (!library->handle) {
      const char *why = dlerror();
      gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "%s: %s%s%s", library->absent, folder && *folder ? library->folder : "",
               folder && *folder ? ": " : "", why ? why : file);
      return false;
    }
  }
  return library->find(library);
}

bool gmi_library_open(gmi_library_t *library) {
  gmi_fork_watch(&fork_ops);
  pthread_mutex_lock(&lock);
  if (!library->found) library->found = load(library);
  bool found = library->found;
  pthread_mutex_unlock(&lock);
  return found;
}

void gmi_library_replace(gmi_library_t *library, void *(*symbol)(const char *name)) {
  pthread_mutex_lock(&lock);
  library->replacement = symbol;
  library->found = false;
  pthread_mutex_unlock(&lock);
}
