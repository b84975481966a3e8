// What products do with their sums. ADD: out += that; GATED: out = f(gate) * up. Defined at compilation: KIND, which is f.

constexpr int ADD = 1, GATED = 2;
constexpr int SILU = 0, GELU = 1, GELU_TANH = 2;

__device__ __forceinline__ float activated(float gate) {
    if (KIND == SILU) return __fdividef(gate, 1.0f + __expf(-gate));
    if (KIND == GELU) return 0.5f * gate * (1.0f + erff(gate * 0.7071067811865476f));
    if (KIND == GELU_TANH) {
        float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return __fdividef(gate, 1.0f + __expf(-2.0f * inner));
    }
    return fmaxf(gate, 0.0f);
}
