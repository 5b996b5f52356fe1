// Thread block clusters (sm_90+): blocks that run together and may store into each other's shared memory.
//
// Before the first such store all blocks meet at a barrier of the cluster, so that the others have started and their mbarriers
// are initialised.  A block may end when everything that goes to it has arrived.
#pragma once
#include <ninferc/base/async.cuh>

namespace ninferc {

#if NINFERC_HAS_BULK_COPY
// All threads of all blocks arrive, then wait.  The arrival orders no memory: mbarriers initialised before it need
// fence_mbarrier_init in between.  (A releasing arrival would wait for all earlier stores of the block to reach L2.)
NINFERC_DEVICE void cluster_arrive() {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_cluster_arrive();
#else
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
NINFERC_DEVICE void cluster_wait() {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_cluster_wait();
#else
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Stores 4 bytes at `address` in the shared memory of block `rank` of the cluster, the own one or another's; its mbarrier at
// `barrier` receives the byte count, and who waits there sees the store.  The addresses are those of the own block.
NINFERC_DEVICE void st_async_4(SharedAddress address, u32 value, SharedAddress barrier, u32 rank) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_st_async(address.value, value, barrier.value, rank);
#else
  u32 remote, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address.value), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(barrier.value), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               :: "r"(remote), "r"(value), "r"(remote_barrier) : "memory");
#endif
}
#endif

}  // namespace ninferc
