/* Links between tiers: how much moved over them, and how fast. SPDX-License-Identifier: Apache-2.0
 *
 * gmi_link() reads constant fields: any thread, no lock. The manager's lock is held in all other functions. Statistics
 * read the figures without a lock: each figure is one atomic word. */
#include "base/check.h"
#include "core/manager.h"

void gmi_links_open(gmi_manager_t *m) {
  static const uint32_t tiers[GMI_LINKS][2] = { { GEMINI_TIER_HOST, GEMINI_TIER_DEVICE },
                                                { GEMINI_TIER_DEVICE, GEMINI_TIER_HOST },
                                                { GEMINI_TIER_HOST, GEMINI_TIER_FILE },
                                                { GEMINI_TIER_FILE, GEMINI_TIER_HOST } };
  for (int i = 0; i < GMI_LINKS; i++) {
    gmi_link_t *link = &m->links[i];
    link->from_tier = tiers[i][0];
    link->to_tier = tiers[i][1];
    if (link->from_tier == GEMINI_TIER_DEVICE) link->from_ordinal = m->config.device_ordinal;
    if (link->to_tier == GEMINI_TIER_DEVICE) link->to_ordinal = m->config.device_ordinal;
    link->stream = GMI_NONE;
  }
  /* A simulated link's rate is configured; that of a real one is unknown until copies have been measured. */
  if (m->config.device != GEMINI_DEVICE_SIMULATED) return;
  gmi_stat_set(&gmi_link_in(m)->bw_bytes_per_s, m->config.sim_h2d_bytes_per_s);
  gmi_stat_set(&gmi_link_out(m)->bw_bytes_per_s, m->config.sim_d2h_bytes_per_s);
}

gmi_link_t *gmi_link(gmi_manager_t *m, uint32_t from_tier, uint32_t to_tier) {
  gmi_link_t *link = m->links;
  while (link->from_tier != from_tier || link->to_tier != to_tier) {
    link++;
    GMI_ASSERT(link < m->links + GMI_LINKS);
  }
  return link;
}

/* Each copy has two marks. A driver holds about 1,000 entries for a stream, of which a copy with its marks and what it
 * waits for takes up to six. */
enum { FULL = 128, BUSY = 32 };
static bool has_queued(gmi_manager_t *m, const gmi_link_t *link, uint64_t copies) {
  if (link->stream == GMI_NONE) return false;
  const uint64_t mark = atomic_load(&m->streams[link->stream].recorded);
  return mark > 2 * copies && !m->device.ops->stream.reached(m->device.self, link->stream, mark - 2 * copies);
}
bool gmi_link_is_full(gmi_manager_t *m, const gmi_link_t *link) { return has_queued(m, link, FULL); }
bool gmi_link_is_busy(gmi_manager_t *m, const gmi_link_t *link) { return has_queued(m, link, BUSY); }

void gmi_link_moved(gmi_manager_t *m, gmi_link_t *link, uint32_t reason, uint64_t chunks) {
  link->moved_bytes[reason] += chunks * gmi_copy_bytes(m, link->from_tier, link->to_tier);
  link->moved_chunks[reason] += chunks;
}

uint64_t gmi_link_rate(const gmi_manager_t *m, const gmi_link_t *link) {
  return link->chunk_ns.samples
             ? (uint64_t)((double)gmi_copy_bytes(m, link->from_tier, link->to_tier) * 1e9 / link->chunk_ns.mean)
             : 0;
}

void gmi_link_measured(gmi_manager_t *m, gmi_link_t *link) {
  if (link->chunk_ns.mean > 0) gmi_stat_set(&link->bw_bytes_per_s, gmi_link_rate(m, link));
}
