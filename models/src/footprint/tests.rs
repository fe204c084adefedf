use super::*;
use crate::{LoraOptions, Recompute, Training, Trains, shapes};

const BF16: ModelPrecision = ModelPrecision {
    dtype: FloatDType::BF16,
    tf32: false,
    weight_format: None,
    kv: KvFormat::Float,
    lora_columns: 0,
};
const NF4: ModelPrecision = ModelPrecision { weight_format: Some(WeightFormat::Nf4), ..BF16 };
const INT8: ModelPrecision = ModelPrecision { weight_format: Some(WeightFormat::Int8), ..BF16 };
/// CUDA, a GPU without tensor cores for this dtype, and a CPU.
const CUDA: MemoryProfile = MemoryProfile { captures: true, processors: 132, max_fused_rows: 128 };
const DENSE: MemoryProfile = MemoryProfile { max_fused_rows: 8, ..CUDA };
const CPU: MemoryProfile = MemoryProfile { captures: false, processors: 0, ..DENSE };

const MIB: u128 = 1 << 20;
const SMALL_PAGE: u128 = 8 * MIB;

fn footprint_of(
    name: &str,
    precision: ModelPrecision,
    workload: &Workload,
    profile: MemoryProfile,
) -> Footprint {
    let config = shapes::named(name).expect("published");
    let weights = config.loaded_bytes(precision);
    config.footprint(precision, weights, workload, profile).expect("a rank that fits")
}

#[test]
fn llama_3_8b_takes_what_it_is_known_to() {
    let llama =
        |precision, workload: &Workload| footprint_of("llama-3-8b", precision, workload, CUDA);
    let one = Workload::new(1, 8192);
    let dense = llama(BF16, &one);
    assert_eq!(dense.weights, 2 * 8_030_261_248);
    // 128 KiB per position, and 64 pairs of cosine and sine.
    let seen = 4 * 4008;
    assert_eq!(dense.kv_cache, 8192 * (131_072 + 4 * 128) + seen);
    // x and its hole, norm(x), gate and up.
    assert_eq!(dense.activations, 2048 * 2 * (4096 + 4096 + 4096 + 2 * 14_336));
    // 144 MiB and one.
    let overhead = SMALL_PAGE + MIB + 512 * 40 * 33;
    assert_eq!((dense.workspace, dense.pool_overhead), (0, overhead));
    let four = llama(NF4, &one);
    // Embedding, head and norms stay dense.
    let rest = 2 * (2 * 128_256 * 4096 + 65 * 4096);
    assert_eq!(four.weights, (8_030_261_248 - rest / 2) * 33 / 64 + rest);
    assert_eq!(four.workspace, 2 * 2 * 14_336 * 4096);
    assert_eq!(four.activations, dense.activations);
    let few = llama(NF4, &Workload::new(16, 1));
    assert_eq!((few.workspace, few.kv_cache), (0, 16 * (131_072 + seen) + 512));
    assert_eq!(few.activations, 16 * (2 * 4 * 128_256 + 4 * 4008 + 2 * 2 * 4096));
    let eight = llama(INT8, &one);
    // Rows of q, k, v, out, gate, up and down of each layer.
    let rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096);
    assert_eq!(eight.weights, 8_030_261_248 - rest / 2 + 4 * rows + rest);
    assert_eq!(eight.workspace, 2 * 14_336 * 4096);
    let bytes = llama(ModelPrecision { kv: KvFormat::Int8, ..BF16 }, &one);
    assert_eq!(bytes.kv_cache, 8192 * (32 * 2 * 8 * (128 + 4) + 4 * 128) + seen);
    let attention = 2048 * 2 * (2 * 4096 + 3 * 4096) + 8192 * 1024 * (2 + 8);
    assert_eq!(bytes.activations, attention.max(dense.activations));
    let parts = four.weights + four.kv_cache + four.activations + four.workspace;
    assert_eq!(four.total(), parts + four.graph + four.pool_overhead);
    // Sequences that share a prompt of 128 positions lie in pages of 64, next to one page of nobody.
    let shared = Workload { shared: Some(2 * 128), ..Workload::new(3, 150) };
    let apart = llama(BF16, &Workload::new(3, 192)).kv_cache - llama(BF16, &shared).kv_cache;
    assert_eq!(apart, (2 * 128 - 64) * 131_072 + 512 * (192 - 150));
}

#[test]
fn a_graph_keeps_the_tensors_of_a_step() {
    let steps = |precision, batch, profile| {
        footprint_of("llama-3-8b", precision, &Workload::new(batch, 8192), profile).graph
    };
    // Two norms per layer and the final one, qkv, queries, attention, out, gate and up, down; logits; two
    // splits of qkv, out, down, and of gate and up.
    let (qkv, inner) = (4096 + 2 * 1024, 14_336);
    let row = 2 * (3 * 4096 + qkv + 2 * 4096 + 4096 + 2 * inner + 4096)
        + 4 * 128_256
        + 8 * (qkv + 4096 + 4096 + 2 * inner);
    assert_eq!(steps(BF16, 1, CUDA), row + GRAPH_OVERHEAD);
    // Joint gate and up are 112 tiles, so k is not split: two splits would need more than 132 processors.
    let joint = row - 2 * inner - 8 * 2 * inner;
    assert_eq!(steps(NF4, 1, CUDA), joint + GRAPH_OVERHEAD);
    assert_eq!(steps(NF4, 16, CUDA), 16 * joint + GRAPH_OVERHEAD);
    // Without tensor cores, a step of 16 rows takes dense copies of a layer's weights, and a separate gate.
    let dense = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14_336 * 4096);
    let gate = 16 * 2 * inner;
    assert_eq!(steps(NF4, 16, DENSE), steps(NF4, 16, CUDA) + dense + gate);
    assert_eq!(steps(NF4, 16, CPU), 0);
}

#[test]
fn splits_of_k_fill_the_processors() {
    // Four splits of 512 x 2048 are 128 tiles, for 132 processors.
    let prompt = Workload::new(1, 512);
    let activations = |profile| footprint_of("llama-3.2-1b", BF16, &prompt, profile).activations;
    let x = 512 * 2048 * 2;
    assert_eq!(activations(CUDA), 2 * x + 512 * 2 * (2048 + 8192) + 4 * 4 * 512 * 2048);
    assert_eq!(activations(CPU), 2 * x + 512 * 2 * (2048 + 2 * 8192));
}

#[test]
fn the_largest_buffer_is_known() {
    let llama = shapes::named("llama-3-8b").expect("published");
    let of = |precision, batch, positions| {
        llama.largest_buffer_bytes(precision, &Workload::new(batch, positions), CPU)
    };
    // Embedding and head, which stay dense, and then the keys of a layer.
    assert_eq!(of(BF16, 1, 64), 2 * 128_256 * 4096);
    assert_eq!(of(NF4, 1, 8192), 2 * 128_256 * 4096);
    assert_eq!(of(BF16, 128, 8192), 128 * 8192 * 8 * 128 * 2);
}

#[test]
fn logits_of_all_rows_take_no_more_than_was_planned() {
    for name in shapes::names() {
        let config = shapes::named(name).expect("published");
        for precision in [BF16, NF4, INT8] {
            for (rows, profile) in
                [1, 16, 100, 2048].into_iter().flat_map(|n| [(n, CPU), (n, CUDA)])
            {
                let at_once = config.rows_with_logits(precision, rows);
                assert!((1..=rows).contains(&at_once), "{name}: {at_once} of {rows}");
                let x = (config.hidden * rows) as u128 * precision.size();
                let row = Rows::new(&config, precision, profile, 1).logits_bytes();
                let logits = at_once as u128 * row;
                let planned =
                    footprint_of(name, precision, &Workload::new(1, rows), profile).activations;
                assert!(at_once == 1 || x + logits <= planned, "{name}: {logits} {planned}");
            }
        }
    }
    let llama = shapes::named("llama-3-8b").expect("published");
    // norm(x), gate and up of 2048 rows, divided by one row of f32 logits and the rows that they are computed
    // from.
    let fitting = 2048 * 2 * (4096 + 2 * 14_336) / (4 * 128_256 + 2 * 2 * 4096);
    assert_eq!(llama.rows_with_logits(BF16, 2048), fitting);
}

#[test]
fn unmerged_lora_adds_its_matmuls() {
    let adapted = |name, weight_format| {
        let precision = ModelPrecision { weight_format, lora_columns: 32, ..BF16 };
        footprint_of(name, precision, &Workload::new(1, 2048), CPU).activations
    };
    let x = 2048 * 2 * 4096;
    let inner = 2048 * 2 * 14_336;
    // norm(x), joint gate and up, its halves, and the activation; or up, gate, and the activation.
    assert_eq!(adapted("llama-3-8b", Some(WeightFormat::Nf4)), 3 * x + 7 * inner);
    assert_eq!(adapted("llama-3-8b", Some(WeightFormat::Int8)), 3 * x + 5 * inner);
    let (x, inner) = (2048 * 2 * 768, 2048 * 2 * 3072);
    // GPT-2 has no gate.
    assert_eq!(adapted("gpt2", Some(WeightFormat::Int8)), 3 * x + 3 * inner);
}

fn training(batch: usize, context: usize, training: Training) -> Workload {
    Workload { training: Some(training), ..Workload::new(batch, context) }
}

#[test]
fn training_llama_3_8b_takes_what_it_is_known_to() {
    let of = |precision, recompute| {
        let options = Training { recompute, ..Training::default() };
        footprint_of("llama-3-8b", precision, &training(4, 512, options), CUDA)
    };
    let made = of(NF4, Recompute::Layers);
    // 41,943,040 values, the same count as PEFT's.
    assert_eq!((made.trained, made.gradients), (4 * 41_943_040, 4 * 41_943_040));
    assert_eq!(made.optimizer, 8 * 41_943_040);
    let (x, inner) = (2 * 2048 * 4096, 2 * 2048 * 14_336);
    let layer = 4 * x + 2 * 2048 * (6144 + 4096) + 4 * 2048 * 32 + 2 * inner;
    let dense = 2 * 14_336 * 4096;
    assert!(dense == 2 * inner, "2048 rows");
    // B of queries, keys and values is one matrix, 0 where they do not meet; and that of gate and up.
    let joined = 16 * 32 * (3 * 6144 + 2 * 2 * 14_336);
    let factors = 2 * (2 * 41_943_040 + joined);
    let loss = 2 * 2048 * 128_256 + 4 * x;
    let all = |backward: u128| loss + backward + factors;
    let again = layer - x;
    assert_eq!((made.saved, made.activations), (32 * x, all(again + 3 * x + inner + 2 * dense)));
    let kept = of(NF4, Recompute::Nothing);
    assert_eq!((kept.saved, kept.activations), (32 * layer, all(3 * x + inner + 2 * dense)));
    let whole = of(BF16, Recompute::Layers);
    assert_eq!((whole.saved, whole.activations), (32 * x, all(again + 3 * x + inner)));
    let int8 = of(INT8, Recompute::Layers);
    assert_eq!((int8.saved, int8.activations), (32 * x, all(again + 3 * x + inner + dense)));
    assert_eq!(made.kept() + made.transient() + made.weights, made.total());
}

#[test]
fn more_takes_more() {
    for name in shapes::names() {
        let total = |workload: Workload| footprint_of(name, NF4, &workload, CUDA).total();
        let one = |batch, context| total(Workload::new(batch, context));
        assert!(one(1, 64) < one(1, 1000) && one(1, 1000) < one(3, 1000), "{name}");
        let lora = |rank| LoraOptions { rank, ..LoraOptions::default() };
        let options = || Training { trains: Trains::Adapter(lora(8)), ..Training::default() };
        let all = total(training(4, 512, options()));
        for more in [
            training(5, 512, options()),
            training(4, 600, options()),
            training(4, 512, Training { recompute: Recompute::Nothing, ..options() }),
            training(4, 512, Training { trains: Trains::Adapter(lora(32)), ..options() }),
        ] {
            assert!(total(more) > all, "{name}");
        }
    }
}
