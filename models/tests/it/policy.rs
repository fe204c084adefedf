//! Losses of policy gradients and their gradients, compared with trl's.

use burn::tensor::{Device, Tensor};
use checkpoint::Checkpoint;
use models::{
    Batch, Bound, Example, KlFactor, Level, Loss, LossKind, MicroBatch, Policy, PolicyRule,
    PolicySequence, Recompute, TokenStats, Trained,
};
use serde::Deserialize;

use crate::fixture;
use crate::full::{Model, largest};

/// Content of the file that `fixtures/grpo.py` writes.
#[derive(Deserialize)]
struct Golden {
    groups: Vec<Group>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Group {
    prompt: Vec<u32>,
    completions: Vec<Vec<u32>>,
}

#[derive(Deserialize, Debug)]
struct Case {
    loss_type: String,
    beta: f64,
    level: String,
    temperature: f64,
    entropy: f64,
    old: bool,
    correction: bool,
    #[serde(default)]
    low: f64,
    #[serde(default)]
    high: f64,
    delta: Option<f64>,
    kl: String,
    most: Option<f64>,
    value: f64,
}

/// Completions that trl scored.
struct Scored {
    examples: Vec<Example>,
    advantages: Vec<f32>,
    old: Vec<Vec<f32>>,
    reference: Vec<Vec<f32>>,
    correction: Vec<Vec<f32>>,
    file: Checkpoint,
    cases: Vec<Case>,
}

/// Longest completion, and so the width of a row of the file.
const LONGEST: usize = 9;

fn scored() -> Scored {
    let text = std::fs::read_to_string(fixture("grpo.json")).expect("grpo.py writes it");
    let Golden { groups, cases } = serde_json::from_str(&text).expect("as grpo.py writes it");
    let file = Checkpoint::open(fixture("grpo.safetensors")).expect("grpo.py writes it");
    let mut examples = Vec::new();
    for Group { prompt, completions } in groups {
        for completion in completions {
            let tokens = [prompt.clone(), completion].concat();
            examples.push(Example { tokens, from: prompt.len() });
        }
    }
    let rows = |name: &str| -> Vec<Vec<f32>> {
        let all = floats(&file, name);
        let rows = all.chunks(LONGEST).zip(&examples);
        rows.map(|(row, own)| row[..own.learned()].to_vec()).collect()
    };
    let (old, reference, correction) = (rows("old"), rows("reference"), rows("correction"));
    let advantages = floats(&file, "advantages");
    Scored { examples, advantages, old, reference, correction, file, cases }
}

fn floats(file: &Checkpoint, name: &str) -> Vec<f32> {
    file.tensor(name).expect("grpo.py writes it").widened().expect("f32").into_owned()
}

fn numbers(made: Tensor<1>) -> Vec<f32> {
    made.into_data().try_to_vec().expect("f32")
}

impl Scored {
    fn policy(&self, case: &Case) -> Policy {
        let kind = LossKind::ALL.into_iter().find(|kind| kind.name() == case.loss_type);
        let lengths: Vec<usize> = self.examples.iter().map(Example::learned).collect();
        let tokens = lengths.iter().sum::<usize>() as f64;
        let weights = kind.expect("a kind of ours").weights(&lengths, LONGEST);
        let bound = match case.most {
            Some(most) => Bound::Capped { most },
            None => Bound::Clipped { low: case.low, high: case.high, delta: case.delta },
        };
        let level = if case.level == "token" { Level::Token } else { Level::Sequence };
        let kl = if case.kl == "ratio" { KlFactor::Ratio } else { KlFactor::One };
        let sequence = |(at, weight): (usize, f64)| PolicySequence {
            advantage: self.advantages[at].into(),
            weight,
            entropy_weight: case.entropy / tokens,
            correction: case.correction.then(|| self.correction[at].clone()),
            old: case.old.then(|| self.old[at].clone()),
            reference: (case.beta != 0.0).then(|| self.reference[at].clone()),
        };
        Policy {
            rule: PolicyRule { bound, level, beta: case.beta, kl, temperature: case.temperature },
            sequences: weights.into_iter().enumerate().map(sequence).collect(),
        }
    }
}

#[test]
fn losses_and_gradients_are_those_of_trl() {
    let (scored, model) = (scored(), Model::open("llama"));
    let tensors = model.parameters.tensors();
    for (index, case) in scored.cases.iter().enumerate() {
        let policy = Some(scored.policy(case));
        let batch = MicroBatch { examples: scored.examples.clone(), policy };
        model.gradients.clear(model.decoder.ctx()).expect("it has kernels");
        let weight = (1.0, Tensor::ones([1], &Device::cpu()));
        let (trained, recompute) = (Trained::Weights(&model.flat), Recompute::Layers.into());
        let made =
            model.decoder.add_gradients(trained, &model.gradients, &batch, weight, &recompute);
        let Loss { sum, stats, .. } = made.expect("a batch");
        let loss = f64::from(numbers(sum)[0]);
        assert!((loss - case.value).abs() < 1e-5, "{case:?}: {loss}");
        assert!(stats.is_some(), "a policy has the numbers of its tokens");
        let sums = model.sums();
        let mut compared = 0;
        for tensor in tensors {
            let [param] = &tensor.params[..] else { continue };
            let name = format!("{index}.model.{}", param.name);
            if !scored.file.names().any(|own| own == name) {
                continue;
            }
            let off = largest(&sums[tensor.at..][..tensor.len()], &floats(&scored.file, &name));
            assert!(off < 1e-4, "{name} {case:?}: {off:e}");
            compared += 1;
        }
        assert_eq!(compared, 3, "{case:?}");
    }
}

#[test]
fn the_first_update_is_that_of_reinforce() {
    let (scored, model) = (scored(), Model::open("llama"));
    let case = scored.cases.iter().find(|case| !case.old && case.beta == 0.0).expect("one");
    let mut policy = scored.policy(case);
    let run = |policy: Policy| {
        let batch = MicroBatch { examples: scored.examples.clone(), policy: Some(policy) };
        model.gradients.clear(model.decoder.ctx()).expect("it has kernels");
        let weight = (1.0, Tensor::ones([1], &Device::cpu()));
        let (trained, recompute) = (Trained::Weights(&model.flat), Recompute::Layers.into());
        let made =
            model.decoder.add_gradients(trained, &model.gradients, &batch, weight, &recompute);
        (made.expect("a batch"), model.sums())
    };
    let (first, sums) = run(policy.clone());
    // The ratio to the policy itself is exactly 1: no bound decides, and the loss is -Σ a.
    let log_probability = numbers(first.stats.expect("numbers of tokens").log_probability);
    let mut rest = &log_probability[..];
    for (own, example) in policy.sequences.iter_mut().zip(&scored.examples) {
        let (these, others) = rest.split_at(example.learned());
        (own.old, rest) = (Some(these.to_vec()), others);
    }
    let (second, same) = run(policy.clone());
    assert_eq!(numbers(first.sum), numbers(second.sum));
    assert!(sums.iter().zip(&same).all(|(a, b)| a.to_bits() == b.to_bits()));
    // REINFORCE: advantage · ∂ln p, as a capped ratio of 1.
    policy.rule.bound = Bound::Capped { most: 1.0 };
    let (_, reinforce) = run(policy);
    assert!(largest(&sums, &reinforce) < 1e-6);
}

#[test]
fn tokens_are_measured_without_a_gradient() {
    let (scored, model) = (scored(), Model::open("llama"));
    let measured = |trained: Option<Trained<'_>>, temperature| {
        let batch = Batch::measured(&scored.examples, temperature);
        let made = model.decoder.loss_of(trained, batch).expect("a batch");
        let TokenStats { log_probability, entropy } = made.stats.expect("numbers of tokens");
        (numbers(log_probability), numbers(entropy), numbers(made.sum)[0])
    };
    let (log_probability, entropy, sum) = measured(Some(Trained::Weights(&model.flat)), 0.7);
    let count: usize = scored.examples.iter().map(Example::learned).sum();
    assert_eq!([log_probability.len(), entropy.len()], [count; 2]);
    let total: f64 = log_probability.iter().map(|own| f64::from(*own)).sum();
    assert!((total + f64::from(sum)).abs() < 1e-3 && sum > 0.0);
    assert!(entropy.iter().all(|own| (0.0..160f32.ln()).contains(own)));
    assert_eq!(measured(None, 0.7).0, log_probability, "the decoder reads the same weights");
    assert_ne!(measured(None, 1.0).0, log_probability, "another temperature");
}

#[test]
fn numbers_for_other_tokens_are_refused() {
    let (scored, model) = (scored(), Model::open("llama"));
    let case = scored.cases.iter().find(|case| case.old && case.beta != 0.0).expect("one");
    let refused = |change: &dyn Fn(&mut Policy)| {
        let mut policy = scored.policy(case);
        change(&mut policy);
        let batch = MicroBatch { examples: scored.examples.clone(), policy: Some(policy) };
        model.decoder.loss_of(None, &batch).expect_err("refused").to_string()
    };
    let error = refused(&|policy| drop(policy.sequences.pop()));
    assert!(error.starts_with("expected 8 sequences of a policy, got 7"), "{error}");
    let error = refused(&|policy| policy.sequences[2].old = None);
    assert!(error.starts_with("expected 7 old log-probabilities of a policy, got 0"), "{error}");
    let error = refused(&|policy| policy.sequences[1].reference = Some(vec![0.0; 3]));
    assert!(error.contains("expected 4 reference log-probabilities of a policy, got 3"), "{error}");
}
