// Element types narrower than fp32: their values, one rounding to nearest even.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace numbers {
inline float of_bits(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
inline unsigned bits_of(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
// To a type of `mantissa` stored bits; beyond `largest` clamped when `saturates`, else infinite.
inline float narrow(float x, int mantissa, int least, float largest, bool saturates) {
  if (x != x) return x;
  if (std::isinf(x)) return saturates ? copysignf(largest, x) : x;
  int exponent;
  frexp(double(x), &exponent);
  const double step = ldexp(1.0, std::max(exponent - 1, least) - mantissa);
  double y = nearbyint(x / step) * step;
  if (fabs(y) > largest) y = saturates ? copysign(double(largest), x) : copysign(INFINITY, x);
  return float(copysign(y, double(x)));
}
inline float from_bf16(uint16_t x) { return of_bits(unsigned(x) << 16); }
inline uint16_t to_bf16(float x) {
  return bits_of(narrow(x, 7, -126, 3.3895313892515355e38f, false)) >> 16;
}
inline float from_fp16(uint16_t x) { _Float16 h; memcpy(&h, &x, 2); return float(h); }
inline uint16_t to_fp16(float x) { _Float16 h = _Float16(x); uint16_t b; memcpy(&b, &h, 2);
    return b; }
template <int kMantissa, int kBias> inline float small_value(unsigned char bits) {
  const int exponent = (bits & 127) >> kMantissa, fraction = bits & ((1 << kMantissa) - 1);
  const bool e5m2 = kMantissa == 2;
  float v = exponent ? ldexpf(1 + fraction / float(1 << kMantissa), exponent - kBias)
                     : ldexpf(fraction / float(1 << kMantissa), 1 - kBias);
  if (e5m2 && exponent == 31) v = fraction ? NAN : INFINITY;
  if (!e5m2 && (bits & 127) == 127) v = NAN;
  return bits & 128 ? -v : v;
}
template <int kMantissa, int kBias> inline unsigned char small_bits(float x, float largest) {
  const unsigned char sign = std::signbit(x) ? 128 : 0;
  if (x != x) return 127;
  const float want = fabsf(narrow(x, kMantissa, 1 - kBias, largest, true));
  for (int bits = 0; bits < 128; ++bits)
    if (small_value<kMantissa, kBias>(bits) == want) return sign | bits;
  abort();
}
inline float from_e4m3(unsigned char x) { return small_value<3, 7>(x); }
inline unsigned char to_e4m3(float x) { return small_bits<3, 7>(x, 448.0f); }
inline float from_e5m2(unsigned char x) { return small_value<2, 15>(x); }
inline unsigned char to_e5m2(float x) { return small_bits<2, 15>(x, 57344.0f); }
}  // namespace numbers
