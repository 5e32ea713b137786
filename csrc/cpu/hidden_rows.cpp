// hidden_rows: what stands between an MLP's two matmuls where torch's GEMM computes those. Forward,
// hidden = dropout(activation(pre)); backward, the gradient of hidden becomes that of pre in place,
// with hidden computed again and fc1_bias's gradient, in one read and one write of each.
#include "gradients.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void hidden_rows(const hidden_rows_args& a) {
  const PartialSums sums(a.dbias ? a.M : 0, a.F);
  const int64_t room = row_stride(a.F);
  const bool plain = a.d_dtype == DType::f32;  // hidden and d are written where they belong
  const Lease lease(a.threads * 2 * room * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    float *const hidden_row = lease.floats() + 2 * team.rank * room, *const d_row =
                                                                         hidden_row + room;
    PartialSums::each_part(team, a.M, [&](int64_t part, Range rows) {
      for (int64_t m = rows.begin; m < rows.end; ++m) {
        const auto place = [&](void* matrix, float* row) {
          return matrix && plain ? static_cast<float*>(matrix) + m * a.F : row;
        };
        float *const hidden = place(a.hidden, hidden_row), *const d =
                                                               a.d ? place(a.d, d_row) : nullptr;
        if (d && !plain) widen_row({a.d_dtype, a.d, a.F}, m, d, a.F);
        const uint64_t first = static_cast<uint64_t>(m * a.F);
        if (d) drop(a.dropout, kHidden, first, d, a.F);
        for (int64_t i = 0; i < a.F; i += Vec::kLanes) {
          const Vec pre = load_as(a.dtype, a.pre, m * a.F + i, a.F - i);
          if (!d) {
            activate_with_slope(a.activation, pre).value.store(hidden + i, a.F - i);
            continue;
          }
          const auto [value, slope] = activate_with_slope(a.activation, pre);
          value.store(hidden + i, a.F - i);
          (Vec::load(d + i, a.F - i) * slope).store(d + i, a.F - i);
        }
        if (a.hidden) drop(a.dropout, kHidden, first, hidden, a.F);
        if (a.dbias) sums.add(part, m == rows.begin, 0, d);
        if (plain) continue;
        if (a.hidden) narrow_row(hidden, a.d_dtype, a.hidden, m * a.F, a.F);
        if (d) narrow_row(d, a.d_dtype, a.d, m * a.F, a.F);
      }
    });
    team.sync();
    if (a.dbias) sums.finish(team, 0, a.dbias);
  });
}

}  // namespace vitkern::VITKERN_ISA
