use super::*;
use models::{Offload, Recompute, Training, Trains};
use ops::training::Moments;

use crate::memory::{MemoryBudget, PlanError, compute_name};

fn card(name: &str) -> ArchProfile {
    ArchProfile::recorded(name).expect("recorded")
}

fn plan(name: &str, options: &EngineOptions, batch: usize, context: usize) -> Plan {
    let workload = Workload::new(batch, context);
    Plan::of_shape(&card(name), "llama-3-8b", options, workload).expect("valid")
}

#[test]
fn eight_billion_fit_a_small_card_in_4_bits_alone() {
    let dense = plan("rtx4080", &EngineOptions::default(), 1, 8192);
    assert!(!dense.fits() && dense.weights_bytes == 2 * 8_030_261_248, "{dense}");
    assert_eq!(dense.largest_batch, Some(0));
    let short = dense.largest_context.expect("a card has memory");
    assert!((1000..8192).contains(&short), "{short}");
    let options = EngineOptions { quant: Some(WeightFormat::Nf4), ..EngineOptions::default() };
    let four = plan("rtx4080", &options, 1, 8192);
    assert!(four.fits() && four.largest_batch > Some(4), "{four}");
    // The largest batch and context fit, and one more does not.
    let batch = four.largest_batch.expect("known");
    assert!(plan("rtx4080", &options, batch, 8192).fits());
    assert!(!plan("rtx4080", &options, batch + 1, 8192).fits());
    let context = dense.largest_context.expect("known");
    assert!(plan("rtx4080", &EngineOptions::default(), 1, context).fits());
    assert!(!plan("rtx4080", &EngineOptions::default(), 1, context + 1).fits());
    assert!(dense.advice().contains("tokens fit"), "{}", dense.advice());
    // Half of the KV cache is enough.
    assert!(dense.advice().contains("--kv-cache int8"), "{}", dense.advice());
    let bytes = EngineOptions { kv: KvFormat::Int8, ..EngineOptions::default() };
    let bytes = plan("rtx4080", &bytes, 1, 8192);
    assert!(bytes.fits() && !bytes.advice().contains("--kv-cache"), "{bytes}");
    let options = EngineOptions { dtype: Some(Compute::F32), ..EngineOptions::default() };
    let advice = plan("rtx4080", &options, 1, 8192).advice();
    let at = |word: &str| advice.find(word).expect("suggested");
    assert!(at("bf16") < at("int8") && at("int8") < at("nf4"), "{advice}");
    assert!(!advice.contains("--kv-cache"), "it counts for nothing: {advice}");
    // The advice has the same number as a plan with that format.
    let advice = dense.advice();
    for (name, quant) in [("int8", WeightFormat::Int8), ("nf4", WeightFormat::Nf4)] {
        let options = EngineOptions { quant: Some(quant), ..EngineOptions::default() };
        let peak = plan("rtx4080", &options, 1, 8192).peak_bytes() as f64 / f64::from(1 << 30);
        assert!(
            advice.contains(&format!("{name} (--quant {name}) takes {peak:.2} GiB")),
            "{advice}"
        );
    }
}

#[test]
fn a_small_budget_fits_nothing() {
    let limit_bytes = Some(1 << 30);
    let budget = MemoryBudget { limit_bytes, ..MemoryBudget::default() };
    let none = plan("h200", &EngineOptions { budget, ..EngineOptions::default() }, 1, 64);
    assert!(!none.fits() && none.largest_context == Some(0), "{none}");
    assert_eq!(none.advice(), "use a larger budget or a smaller model", "in 4 bits neither");
}

#[test]
fn what_no_buffer_holds_is_refused() {
    let browser = ArchProfile { max_buffer_bytes: Some(128 << 20), ..card("rtx4090") };
    let of = |shape, context| {
        let options = EngineOptions::default();
        Plan::of_shape(&browser, shape, &options, Workload::new(1, context))
    };
    let refused = of("llama-3-8b", 64).expect_err("its embedding has a GiB");
    assert!(
        matches!(refused, LoadError::Plan(PlanError::Buffer { max: 134_217_728, .. })),
        "{refused}"
    );
    let said = refused.to_string();
    assert!(said.starts_with("the workload needs a buffer of 1002.00 MiB, but"), "{said}");
    of("gpt2", 64).expect("its embedding has 74 MiB");
}

#[test]
fn what_means_nothing_is_refused() {
    let refused = |options, batch, context| {
        let workload = Workload::new(batch, context);
        let plan = Plan::of_shape(&card("rtx4090"), "llama-3-8b", &options, workload);
        plan.expect_err("refused").to_string()
    };
    let options = EngineOptions::default;
    assert!(refused(options(), 0, 64).starts_with("batch is 0\nhint: "));
    assert!(refused(options(), 1, 0).starts_with("context is 0\nhint: "));
    assert!(refused(options(), 1, 8193).contains("8193"));
    for fraction in [0.0, -1.0, 1.5, f64::NAN] {
        let budget = MemoryBudget { fraction, ..MemoryBudget::default() };
        let why = refused(EngineOptions { budget, ..options() }, 1, 64);
        assert!(why.starts_with("fraction is "), "{why}");
    }
    let budget = MemoryBudget { limit_bytes: Some(0), ..MemoryBudget::default() };
    assert!(refused(EngineOptions { budget, ..options() }, 1, 64).starts_with("limit is 0 bytes"));
}

#[test]
fn keys_and_values_in_8_bits_need_bytes() {
    let mut profile = ArchProfile::recorded("rtx4090").expect("recorded");
    let options = EngineOptions { kv: KvFormat::Int8, ..EngineOptions::default() };
    let load = load_options(&profile, &options, FloatDType::BF16).expect("it has them");
    assert_eq!(load.kv, KvFormat::Int8);
    profile.dtypes.retain(|dtype| *dtype != DType::I8);
    let refused = load_options(&profile, &options, FloatDType::BF16).expect_err("none");
    assert!(matches!(refused, LoadError::KvFormat { .. }), "{refused}");
}

#[test]
fn activations_in_8_bits_are_for_cuda_and_matrices_in_8_bits() {
    let mut profile = ArchProfile::recorded("rtx4090").expect("recorded");
    let of = |profile: &ArchProfile, quant| {
        let int8_activations = true;
        let options = EngineOptions { quant, int8_activations, ..EngineOptions::default() };
        Prepared::of_shape(profile, "llama-3-8b", &options).map(drop)
    };
    of(&profile, Some(WeightFormat::Int8)).expect("a card that has them");
    for quant in [None, Some(WeightFormat::Nf4)] {
        assert!(matches!(of(&profile, quant), Err(LoadError::Int8Activations)));
    }
    profile.backend = Backend::Vulkan;
    let refused = of(&profile, Some(WeightFormat::Int8));
    assert!(matches!(refused, Err(LoadError::Int8Activations)));
}

#[test]
fn tf32_is_for_dense_matrices_of_devices_that_have_it() {
    let mut profile = ArchProfile::recorded("rtx4090").expect("recorded");
    let of = |profile: &ArchProfile, quant| {
        let options =
            EngineOptions { dtype: Some(Compute::Tf32), quant, ..EngineOptions::default() };
        Prepared::of_shape(profile, "llama-3-8b", &options).map(|own| own.planned)
    };
    let planned = of(&profile, None).expect("a card that has it");
    assert_eq!(
        (compute_name(planned.precision).as_str(), planned.weights),
        ("tf32", 32_121_044_992)
    );
    for quant in WeightFormat::at_load() {
        assert!(matches!(of(&profile, Some(quant)), Err(LoadError::Tf32)));
    }
    profile.dtypes.retain(|dtype| *dtype != DType::Tf32);
    let refused = of(&profile, None);
    assert!(matches!(refused, Err(LoadError::DType { need: DType::Tf32, .. })));
}

#[test]
fn shapes_are_known_by_their_names() {
    let profile = ArchProfile::recorded("rtx4090").expect("recorded");
    let of_shape = |name| Prepared::of_shape(&profile, name, &EngineOptions::default());
    assert!(
        models::shapes::names().count() > 0
            && models::shapes::names().all(|name| of_shape(name).is_ok())
    );
    let refused = of_shape("llama-9").err().expect("no such shape").to_string();
    assert!(models::shapes::names().all(|name| refused.contains(name)), "{refused}");
}

#[test]
fn eight_billion_are_trained_on_a_small_card_in_4_bits() {
    let plan = |quant, batch, context, recompute| {
        let options = EngineOptions { quant, ..EngineOptions::default() };
        let training = Some(Training { recompute, ..Training::default() });
        let workload = Workload { training, ..Workload::new(batch, context) };
        Plan::of_shape(&card("rtx4080"), "llama-3-8b", &options, workload).expect("valid")
    };
    let dense = plan(None, 4, 512, Recompute::Layers);
    assert!(!dense.fits() && dense.largest_batch < Some(4), "{dense}");
    assert!(dense.advice().contains("--quant nf4"), "{}", dense.advice());
    let nf4 = |batch, context| plan(Some(WeightFormat::Nf4), batch, context, Recompute::Layers);
    let four = nf4(4, 512);
    assert!(four.fits(), "{four}");
    let (batch, context) =
        (four.largest_batch.expect("known"), four.largest_context.expect("known"));
    assert!(nf4(batch, 512).fits() && nf4(4, context).fits());
    let more = nf4(batch + 1, 512);
    assert!(!more.fits() && more.advice().starts_with(&format!("a batch of {batch} fits")));
    let kept = plan(Some(WeightFormat::Nf4), 8, 512, Recompute::Nothing);
    assert!(!kept.fits() && kept.advice().contains("--recompute layers"), "{kept}");
}

#[test]
fn all_weights_of_eight_billion_are_trained_on_a_24_gib_card() {
    let plan = |offload, micro_batches| {
        let trains = Trains::Weights { master: false, moments: Moments::Int8, muon: false };
        let recompute = Recompute::Layers;
        let training = Some(Training { trains, recompute, offload, micro_batches });
        let workload = Workload { training, ..Workload::new(2, 2048) };
        Plan::of_shape(&card("rtx4090"), "llama-3-8b", &EngineOptions::default(), workload)
            .expect("valid")
    };
    let all = Offload { optimizer: true, gradients: true, inputs: true };
    let made = plan(all, 32);
    assert!(made.fits() && made.peak_bytes() < 20 << 30, "{made}");
    // Moments, gradients in f32, and an input of each layer and micro-batch.
    assert!((80..84).contains(&(made.host_bytes >> 30)), "{made}");
    assert_eq!(plan(all, 1).peak_bytes(), made.peak_bytes());
    // Gradients on the card leave no room.
    let state = plan(Offload { optimizer: true, ..Offload::default() }, 1);
    assert!(!state.fits() && state.advice().contains("--offload optimizer,gradients"), "{state}");
    assert!(plan(Offload::default(), 1).advice().contains("--offload optimizer"));
    let weights = 2 * 8_030_261_248;
    assert!(made.save_bytes(false) >= weights && made.save_bytes(true) >= 2 * weights);
}
