// hidden_rows: what stands between an MLP's two matmuls where torch's GEMM computes those. Forward,
// hidden = dropout(activation(pre)); backward, the gradient of hidden becomes that of pre in place,
// with hidden computed again and fc1_bias's gradient, in one read and one write of each.
#include "gradients.hpp"
#include "kernels.hpp"
#include "slopes.hpp"

namespace vitkern::VITKERN_ISA {

void hidden_rows(const hidden_rows_args& a) {
  const PartialSums sums(a.dbias ? a.M : 0, a.F);
  const int64_t room = row_stride(a.F);
  const Lease lease(a.threads * room * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    float* const kept = lease.floats() + team.rank * room;  // a row of hidden that is not asked for
    PartialSums::each_part(team, a.M, [&](int64_t part, Range rows) {
      for (int64_t m = rows.begin; m < rows.end; ++m) {
        float *const hidden = a.hidden ? a.hidden + m * a.F : kept, *const d = a.d ? a.d + m * a.F
                                                                                   : nullptr;
        const uint64_t first = static_cast<uint64_t>(m * a.F);
        if (d) drop(a.dropout, kHidden, first, d, a.F);
        with_slope(a.activation, [&](const auto& activated) {
          each_vector(a.F, [&](int64_t i, auto n) {
            const auto [value, slope] = activated(load_as(a.dtype, a.pre, m * a.F + i, n));
            value.store(hidden + i, n);
            if (d) (Vec::load(d + i, n) * slope).store(d + i, n);
          });
        });
        if (a.hidden) drop(a.dropout, kHidden, first, hidden, a.F);
        if (a.dbias) sums.add(part, m == rows.begin, 0, d);
      }
    });
    team.sync();
    if (a.dbias) sums.finish(team, 0, a.dbias);
  });
}

}  // namespace vitkern::VITKERN_ISA
