// Times CUTLASS's implicit GEMM for sm_80 on convolutions of stride 1 that keep the size of an image: f16, channels last, sums in
// f32, best of four tiles and of four splits of k.
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -I CUTLASS/include cutlass_conv.cu -o cutlass_conv
//   ./cutlass_conv BATCH,SIZE,CHANNELS,FILTERS,TAPS ...
//
// CUTLASS is the folder of the headers, for example that of the wheel nvidia-cutlass. Prints one JSON object per convolution.

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include <cutlass/conv/kernel/default_conv2d_fprop.h>
// The first header lacks what the second one includes.
#include <cutlass/conv/device/implicit_gemm_convolution.h>

using Half = cutlass::half_t;
using Layout = cutlass::layout::TensorNHWC;

static void check(cudaError_t error) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
        std::exit(1);
    }
}

template <int M, int N, int K, int WarpM, int WarpN, int Stages>
using Conv = cutlass::conv::device::ImplicitGemmConvolution<typename cutlass::conv::kernel::DefaultConv2dFprop<
    Half, Layout, Half, Layout, Half, Layout, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<M, N, K>, cutlass::gemm::GemmShape<WarpM, WarpN, K>, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<Half, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>, Stages, cutlass::arch::OpMultiplyAdd,
    cutlass::conv::IteratorAlgorithm::kOptimized>::Kernel>;

// Fills with random numbers: equal ones take less power, and the card clocks higher.
static void fill(Half *to, size_t count) {
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<Half> values(count);
    for (Half &value : values) value = Half(uniform(random));
    check(cudaMemcpy(to, values.data(), 2 * count, cudaMemcpyHostToDevice));
}

struct Buffers {
    Half *x, *w, *out;
    void *workspace;
    size_t workspace_bytes;
};

// Returns the median milliseconds of a launch, or a negative number if the tile does not support the problem.
template <class Op>
float time_of(const cutlass::conv::Conv2dProblemSize &p, const Buffers &b) {
    typename Op::Arguments arguments{
        p,
        {b.x, Layout::packed({p.N, p.H, p.W, p.C})},
        {b.w, Layout::packed({p.K, p.R, p.S, p.C})},
        {b.out, Layout::packed({p.N, p.P, p.Q, p.K})},
        {b.out, Layout::packed({p.N, p.P, p.Q, p.K})},
        {1.0f, 0.0f},
        cutlass::conv::SplitKMode::kSerial};
    Op op;
    if (op.can_implement(arguments) != cutlass::Status::kSuccess) return -1;
    if (op.get_workspace_size(arguments) > b.workspace_bytes) return -1;
    if (op.initialize(arguments, b.workspace) != cutlass::Status::kSuccess) return -1;
    for (int i = 0; i < 5; i++) op();
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    std::vector<float> times;
    for (int round = 0; round < 20; round++) {
        const int count = 10;
        check(cudaEventRecord(begin));
        for (int i = 0; i < count; i++) op();
        check(cudaEventRecord(end));
        check(cudaEventSynchronize(end));
        float ms;
        check(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(ms / count);
    }
    check(cudaGetLastError());
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int batch, size, channels, filters, taps;
        if (std::sscanf(argv[i], "%d,%d,%d,%d,%d", &batch, &size, &channels, &filters, &taps) != 5) {
            std::fprintf(stderr, "expected BATCH,SIZE,CHANNELS,FILTERS,TAPS, got %s\n", argv[i]);
            return 2;
        }
        Buffers b;
        b.workspace_bytes = 64 << 20;
        const size_t pixels = size_t(batch) * size * size;
        check(cudaMalloc(&b.x, pixels * channels * 2));
        check(cudaMalloc(&b.w, size_t(filters) * taps * taps * channels * 2));
        check(cudaMalloc(&b.out, pixels * filters * 2));
        check(cudaMalloc(&b.workspace, b.workspace_bytes));
        fill(b.x, pixels * channels);
        fill(b.w, size_t(filters) * taps * taps * channels);
        check(cudaMemset(b.workspace, 0, b.workspace_bytes));
        float best = -1;
        const char *tile = "";
        int best_split = 1;
        for (int split : {1, 2, 4, 8}) {
            cutlass::conv::Conv2dProblemSize p(
                {batch, size, size, channels}, {filters, taps, taps, channels},
                {taps / 2, taps / 2, taps / 2, taps / 2}, {1, 1}, {1, 1}, cutlass::conv::Mode::kCrossCorrelation, split);
            const std::pair<float, const char *> all[] = {
                {time_of<Conv<128, 128, 64, 64, 64, 3>>(p, b), "128x128x64"},
                {time_of<Conv<256, 128, 32, 64, 64, 3>>(p, b), "256x128x32"},
                {time_of<Conv<128, 64, 64, 64, 32, 3>>(p, b), "128x64x64"},
                {time_of<Conv<64, 64, 64, 32, 32, 4>>(p, b), "64x64x64"},
            };
            for (auto [ms, name] : all) {
                if (ms > 0 && (best < 0 || ms < best)) {
                    best = ms;
                    tile = name;
                    best_split = split;
                }
            }
        }
        const double flops = 2.0 * pixels * filters * taps * taps * channels;
        std::printf(
            "{\"batch\": %d, \"size\": %d, \"channels\": %d, \"filters\": %d, \"taps\": %d, \"tile\": \"%s\", "
            "\"splits\": %d, \"ms\": %.5f, \"tflops\": %.1f}\n",
            batch, size, channels, filters, taps, tile, best_split, best, flops / best / 1e9);
        for (void *buffer : {(void *)b.x, (void *)b.w, (void *)b.out, b.workspace}) check(cudaFree(buffer));
    }
}
