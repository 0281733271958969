// A linear layer of a few rows on AMX tiles: out[m, n] = x[m, k] * weight[n, k]^T + bias[n], all bfloat16, sums in float32.
//
// For each 32 columns and 32 k the weight lies in two tiles of 1 KiB, as `pack` writes it, so a product reads memory once
// and in order. What makes it faster than oneDNN's own, which uses the same instructions, is that the weight is asked for
// ahead of its use: tile loads alone leave the memory bus idle. Each sum goes over k in steps of 32, as oneDNN's does up
// to 32 rows, so its bits are the same; rank/tiled_linear.py tests that on the host.
//
// k and n are multiples of 32, m is 1 to 32, tiles are aligned to 64 bytes.
//
// The operator is here too, by torch's stable interface for C++: in Python it took as long as a small model's product.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <unistd.h>

#include <optional>
#include <vector>

namespace {

constexpr int kAhead = 4096;  // bytes: two steps

struct Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums (rows below 16, then the others; 16 columns each); 4, 5: input; 6, 7: weight.
void configure(int m) {
  const int low = m < 16 ? m : 16, high = m > 16 ? m - 16 : 1;
  Config config;
  for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64;
  config.rows[6] = config.rows[7] = 16;
  config.rows[0] = config.rows[1] = config.rows[4] = low;
  config.rows[2] = config.rows[3] = config.rows[5] = high;
  // Not _tile_loadconfig: that of GCC 12 tells the compiler of the first 8 bytes alone.
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// Columns `out` to `out` + 32.
void columns(const uint16_t *x, int m, int k, const char *weight, const uint16_t *bias, uint16_t *out, long row) {
  alignas(64) float sums[32 * 32];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < k / 32; step++, weight += 2048) {
    for (int line = 0; line < 2048; line += 64) _mm_prefetch(weight + kAhead + line, _MM_HINT_T0);
    _tile_loadd(4, x + step * 32, k * 2);
    _tile_loadd(6, weight, 64);
    _tile_loadd(7, weight + 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (m > 16) {
      _tile_loadd(5, x + 16 * k + step * 32, k * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (m > 16) {
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
  }
  for (int half = 0; half < 32; half += 16) {
    const __m512i wide = bias ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(bias + half))) : __m512i();
    const __m512 added = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    for (int i = 0; i < m; i++) {
      __m512 sum = _mm512_load_ps(sums + i * 32 + half);
      if (bias) sum = _mm512_add_ps(sum, added);
      _mm256_storeu_si256((__m256i *)(out + i * row + half), (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

}  // namespace

extern "C" {

// Ask the kernel for tiles, which a process has to do once. 0: it may use them.
int cpupp_permit_tiles() { return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */); }

// weight [n, k], rows one after the other -> tiles [n/32, k/32, 2, 16 pairs of k, 16 columns, 2].
void cpupp_pack(const uint16_t *weight, uint16_t *tiles, long n, long k) {
#pragma omp parallel for
  for (long block = 0; block < n / 32; block++) {
    uint16_t *out = tiles + block * 32 * k;
    for (long step = 0; step < k / 32; step++)
      for (int half = 0; half < 2; half++)
        for (int pair = 0; pair < 16; pair++)
          for (int column = 0; column < 16; column++, out += 2)
            memcpy(out, weight + (block * 32 + half * 16 + column) * k + step * 32 + pair * 2, 4);
  }
}

// bias: [n] or null.
void cpupp_linear(const uint16_t *x, const uint16_t *tiles, const uint16_t *bias, uint16_t *out, long m, long n, long k) {
#pragma omp parallel
  {
    configure((int)m);
#pragma omp for schedule(static)
    for (long block = 0; block < n / 32; block++)
      columns(x, (int)m, (int)k, (const char *)(tiles + block * 32 * k), bias ? bias + block * 32 : nullptr,
              out + block * 32, n);
    _tile_release();
  }
}
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;

constexpr int64_t kMostRows = 32;

template <typename... Arguments>
void call(const char *name, const Arguments &...arguments) {
  StableIValue stack[] = {from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION));
}

// As x.new_empty([..., n]), without the dispatcher, which takes as long as all else here.
Tensor empty(const Tensor &x, int64_t n) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end()), strides(sizes.size(), 1);
  sizes.back() = n;
  for (size_t i = sizes.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * sizes[i + 1];
  int32_t dtype = 0;
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype,
                                                         aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// choice: uint8 [1 + kMostRows], whether tiles are the faster way by number of rows; its first says whether that was
// measured. The other way is vLLM's (0.32): _C::onednn_mm(out, input, bias, handler).
Tensor linear(Tensor x, Tensor tiles, Tensor handler, std::optional<Tensor> bias, Tensor choice, int64_t n) {
  const int64_t k = x.size(-1), rows = x.numel() / k;
  const Tensor out = empty(x, n);
  const auto *chosen = static_cast<const uint8_t *>(choice.data_ptr());
  if (!chosen[0]) call("cpupp_tiles::choose", choice, n, k);
  const bool plain = x.scalar_type() == ScalarType::BFloat16 && (!bias || bias->scalar_type() == ScalarType::BFloat16);
  if (plain && rows > 0 && rows <= kMostRows && chosen[rows]) {
    const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
    if (bias && !bias->is_contiguous()) bias = torch::stable::contiguous(*bias);
    cpupp_linear(static_cast<const uint16_t *>(dense.data_ptr()), static_cast<const uint16_t *>(tiles.data_ptr()),
                 bias ? static_cast<const uint16_t *>(bias->data_ptr()) : nullptr, static_cast<uint16_t *>(out.data_ptr()),
                 rows, n, k);
  } else {
    call("_C::onednn_mm", out, x.dim() == 2 ? x : torch::stable::reshape(x, {rows, k}), bias, handler);
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cpupp_tiles, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }
