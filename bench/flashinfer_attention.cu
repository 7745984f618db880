// FlashInfer's paged attention (its FA2 template, which packs the heads of a group as rows) for bf16
// heads of 128, behind two C functions. `bench.flashinfer` compiles it with the headers of
// FlashInfer's wheel.
#include <vector>

#include <flashinfer/attention/default_prefill_params.cuh>
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
