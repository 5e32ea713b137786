// rotary: queries and keys turned by the angles of their rows, values copied: one read and one
// write of qkv. Rows are shared out evenly; a head's row is in L1.
#include "arena.hpp"
#include "kernels.hpp"
#include "rows.hpp"
#include "scratch.hpp"
#include "turn.hpp"

namespace vitkern::VITKERN_ISA {

void rotary(const rotary_args& a) {
  const int64_t room = row_stride(a.E);
  const Lease lease(a.threads * room * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    float* const head = lease.floats() + team.rank * room;
    const Range rows = team.share(a.B * a.S);
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      const int64_t b = m / a.S, s = m % a.S;
      for (int64_t part = 0; part < 3; ++part)
        for (int64_t h = 0; h < a.H; ++h) {
          const int64_t from =
              b * a.b_stride + s * a.s_stride + part * a.part_stride + h * a.h_stride;
          widen_row({a.dtype, offset(a.dtype, a.qkv, from), 0}, 0, head, a.E);
          const float* const table = a.table + ((a.P > 1 ? h * a.S : 0) + s) * a.E;
          if (part < 2) turn(head, table, a.E, a.half, a.back ? -1.0f : 1.0f);
          narrow_row(head, a.dtype, a.y, ((m * 3 + part) * a.H + h) * a.E, a.E);
        }
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
