// FlashInfer's paged attention (its FA2 template, which packs the heads of a group as rows) for bf16
// heads of 128, and its latent attention for Hopper, behind two C functions each. `bench.flashinfer`
// compiles it with the headers of FlashInfer's wheel.
#include <vector>

#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/mla_hopper.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>

using namespace flashinfer;
using Element = __nv_bfloat16;
using Params = BatchPrefillPagedParams<Element, Element, Element, int32_t>;
using Variant = DefaultAttention<false, false, false, false>;
constexpr int HEAD = 128;

struct Sizes {
  int64_t tokens, batch, heads, kv_heads, page;
};

// Its planner: reads `rows` and `pages` (bounds of tokens and of pages) on the host, fills `room`.
extern "C" int flashinfer_plan(void* floats, size_t float_bytes, void* room, void* pinned,
                               size_t room_bytes, int32_t* rows, int32_t* pages, const Sizes* sizes,
                               int64_t* plan, void* stream) {
  PrefillPlanInfo info;
  auto status = PrefillPlan<int32_t>(
      floats, float_bytes, room, pinned, room_bytes, info, rows, pages, sizes->tokens, sizes->batch,
      sizes->heads, sizes->kv_heads, HEAD, HEAD, sizes->page, false, sizeof(Element), -1, -1, false,
      0, -1, false, static_cast<cudaStream_t>(stream));
  auto found = info.ToVector();
  for (size_t i = 0; i < found.size(); ++i) plan[i] = found[i];
  return status;
}

template <MaskMode MASK>
cudaError_t launch(const PrefillPlanInfo& info, const Params& params, Element* partial,
                          float* sums, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  DISPATCH_CTA_TILE_Q(info.cta_tile_q, ROWS, {
    status = BatchPrefillWithPagedKVCacheDispatched<true, ROWS, HEAD, HEAD, PosEncodingMode::kNone,
                                                    false, MASK, false, Variant>(
        params, partial, sums, false, stream);
  });
  return status;
}

// Caches are [pages, page, kv_heads, HEAD]; q and o are [tokens, heads, HEAD].
extern "C" int flashinfer_run(void* floats, void* room, const int64_t* plan, void* q, void* k,
                              void* v, int32_t* rows, int32_t* pages, int32_t* numbers,
                              int32_t* last, void* o, const Sizes* sizes, float scale, int causal,
                              void* stream) {
  PrefillPlanInfo info;
  info.FromVector(std::vector<int64_t>(plan, plan + 15));
  Params params;
  params.q = static_cast<Element*>(q);
  params.paged_kv = paged_kv_t<Element, int32_t>(
      sizes->kv_heads, sizes->page, HEAD, sizes->batch, QKVLayout::kNHD, static_cast<Element*>(k),
      static_cast<Element*>(v), numbers, pages, last);
  params.q_indptr = rows;
  params.o = static_cast<Element*>(o);
  params.num_qo_heads = sizes->heads;
  params.group_size = uint_fastdiv(sizes->heads / sizes->kv_heads);
  params.q_stride_n = sizes->heads * HEAD;
  params.q_stride_h = HEAD;
  params.window_left = -1;
  params.sm_scale = scale;
  auto number = [&](int64_t at) { return GetPtrFromBaseOffset<int32_t>(room, at); };
  params.request_indices = number(info.request_indices_offset);
  params.qo_tile_indices = number(info.qo_tile_indices_offset);
  params.kv_tile_indices = number(info.kv_tile_indices_offset);
  params.o_indptr = number(info.o_indptr_offset);
  params.kv_chunk_size_ptr = number(info.kv_chunk_size_ptr_offset);
  Element* partial = nullptr;
  float* sums = nullptr;
  if (info.split_kv) {
    params.merge_indptr = number(info.merge_indptr_offset);
    partial = GetPtrFromBaseOffset<Element>(floats, info.v_offset);
    sums = GetPtrFromBaseOffset<float>(floats, info.s_offset);
  }
  params.padded_batch_size = info.padded_batch_size;
  params.max_total_num_rows = info.total_num_rows;
  auto where = static_cast<cudaStream_t>(stream);
  return causal ? launch<MaskMode::kCausal>(info, params, partial, sums, where)
                : launch<MaskMode::kNone>(info, params, partial, sums, where);
}


// Bounds of tokens and of pages, and the keys of each sequence, are read on the host.
extern "C" int flashinfer_latent_plan(void* floats, size_t float_bytes, void* room, void* pinned,
                                      size_t room_bytes, int32_t* rows, int32_t* pages,
                                      int32_t* keys, const Sizes* sizes, int causal, int64_t* plan,
                                      void* stream) {
  MLAPlanInfo info;
  size_t staged = 0;
  auto status = MLAPlan(floats, float_bytes, room, pinned, room_bytes, info, staged, rows, pages,
                        keys, sizes->batch, sizes->heads, 512, causal != 0,
                        static_cast<cudaStream_t>(stream));
  // Unlike the other planner this one leaves the copy of its work space to the caller.
  if (status == cudaSuccess)
    status = cudaMemcpyAsync(room, pinned, staged, cudaMemcpyHostToDevice,
                             static_cast<cudaStream_t>(stream));
  auto found = info.ToVector();
  for (size_t i = 0; i < found.size(); ++i) plan[i] = found[i];
  return status == cudaSuccess ? static_cast<int>(found.size()) : -static_cast<int>(status);
}

template <typename Entry, MaskMode MASK>
cudaError_t latent(void* floats, void* room, const int64_t* plan, int count, void* q, void* cache,
                   int32_t* numbers, void* o, const Sizes* sizes, float scale,
                   cudaStream_t stream) {
  MLAPlanInfo info;
  info.FromVector(std::vector<int64_t>(plan, plan + count));
  auto number = [&](int64_t at) { return GetPtrFromBaseOffset<int32_t>(room, at); };
  MLAParams<Element, Entry, Element, int32_t> params;
  params.q_nope = static_cast<Element*>(q);
  params.q_pe = params.q_nope + 512;
  params.ckv = static_cast<Entry*>(cache);
  params.kpe = params.ckv + 512;
  params.q_indptr = number(info.q_indptr_offset);
  params.kv_indptr = number(info.kv_indptr_offset);
  params.partial_indptr = number(info.partial_indptr_offset);
  params.kv_indices = numbers;
  params.q_len = number(info.q_len_offset);
  params.kv_len = number(info.kv_len_offset);
  params.q_start = number(info.q_start_offset);
  params.kv_start = number(info.kv_start_offset);
  params.kv_end = number(info.kv_end_offset);
  params.work_indptr = number(info.work_indptr_offset);
  params.merge_packed_offset_start = number(info.merge_packed_offset_start_offset);
  params.merge_packed_offset_end = number(info.merge_packed_offset_end_offset);
  params.merge_partial_packed_offset_start = number(info.merge_partial_packed_offset_start_offset);
  params.merge_partial_packed_offset_end = number(info.merge_partial_packed_offset_end_offset);
  params.merge_partial_stride = number(info.merge_partial_stride_offset);
  params.final_o = static_cast<Element*>(o);
  params.final_lse = nullptr;
  params.partial_o = GetPtrFromBaseOffset<Element>(floats, info.partial_o_offset);
  params.partial_lse = GetPtrFromBaseOffset<float>(floats, info.partial_lse_offset);
  params.num_heads = uint_fastdiv(sizes->heads);
  params.block_size = uint_fastdiv(sizes->page);
  params.q_nope_stride_n = params.q_pe_stride_n = sizes->heads * 576;
  params.q_nope_stride_h = params.q_pe_stride_h = 576;
  params.ckv_stride_page = params.kpe_stride_page = sizes->page * 576;
  params.ckv_stride_n = params.kpe_stride_n = 576;
  params.o_stride_n = sizes->heads * 512;
  params.o_stride_h = 512;
  params.sm_scale = scale;
  params.return_lse_base_on_e = false;
  return mla::BatchMLAPageAttentionHopper<MASK, 512, 64>(params, info.num_blks_x, info.num_blks_y,
                                                         stream);
}

// The cache is [pages, page, 576], of bf16 or `narrow` e4m3; q is [tokens, heads, 576] and o
// [tokens, heads, 512].
extern "C" int flashinfer_latent_run(void* floats, void* room, const int64_t* plan, int count,
                                     void* q, void* cache, int32_t* numbers, void* o,
                                     const Sizes* sizes, float scale, int causal, int narrow,
                                     void* stream) {
  if (causal && narrow) return cudaErrorNotSupported;
  auto run = causal   ? latent<Element, MaskMode::kCausal>
             : narrow ? latent<__nv_fp8_e4m3, MaskMode::kNone>
                      : latent<Element, MaskMode::kNone>;
  return run(floats, room, plan, count, q, cache, numbers, o, sizes, scale,
             static_cast<cudaStream_t>(stream));
}
