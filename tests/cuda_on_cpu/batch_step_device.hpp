// What fused_batch_step.cu needs besides chain_device.hpp, behind it.
DEV float fmaxf(float a, float b) { return a != a ? b : b != b ? a : std::max(a, b); }
using std::max;
DEV const u16* hidden(const u16* p) { return p; }
DEV int __popc(u32 v) { return __builtin_popcount(v); }
