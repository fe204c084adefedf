//! GRPO: a policy learns from rewards of its own completions, in one process and with one copy of the weights.
//!
//! ```text
//! sample      completions of each prompt, all groups together               decode steps read the weights that train
//! reward      scores of each, by closures, rules or commands
//! reference   ln p of the tokens before training, if beta > 0
//! old         ln p of the tokens now, if updates > 1 or corrected
//! learn       updates × (Σ over micro-batches of the gradient, AdamW)       in place
//! ```
//!
//! The draws of a completion depend on the seed, the number of the batch, its prompt's place in the batch, its own place in the
//! group, and the position of each token: on nothing else. See [`models::policy`] for the losses and [`Advantages`] for advantages.

mod advantages;
mod data;
mod error;
mod options;
mod plan;
mod reference;
mod report;
mod rewards;
mod state;

use models::{Adapted, Batch, Example, MicroBatch, PagedCache, Policy, PolicySequence, Workload};
use serde::{Deserialize, Serialize};
use tune::timing::Stopwatch;

use crate::engine::{Completion, FinishReason, Request, Sampling};
use crate::memory::Grant;
use crate::train::{TrainError, Trainer};
use reference::Reference;
use report::Sums;

pub use advantages::{Advantages, Scale};
pub use data::{GrpoPrompt, Prompts};
pub use error::GrpoError;
pub use models::{KlFactor, Level, LossKind};
pub use options::{Correction, GrpoOptions, ReferencePlace};
pub use plan::GrpoPlan;
pub use report::{
    DrawingReport, LearningReport, LogRatio, Phase, Phases, Report, RewardFault, RewardReport,
    Sample,
};
pub use rewards::{Command, Reward, RewardError, Rule, Score, Scored, parse_reward};

/// A reward function, and the factor of its scores.
pub struct WeightedReward {
    /// Name in the log.
    pub name: String,
    /// The function.
    pub reward: Box<dyn Reward>,
    /// Factor of its scores.
    pub weight: f64,
}

impl<R: Reward + 'static> From<R> for WeightedReward {
    fn from(reward: R) -> Self {
        Self { name: "reward".to_owned(), reward: Box::new(reward), weight: 1.0 }
    }
}

/// A policy that learns from rewards. It owns the trainer of its weights.
pub struct Grpo {
    options: GrpoOptions,
    rewards: Vec<WeightedReward>,
    /// Batches drawn so far.
    drawn: u64,
    batch: Option<Drawn>,
    reference: Reference,
    sequences: Option<Sequences>,
    /// The policy of an adapter, to draw from.
    adapted: Option<Adapted>,
    /// Dropped last, because the last user of a model frees its memory pages.
    trainer: Trainer,
}

/// Memory of the sequences that are drawn together.
struct Sequences {
    cache: PagedCache,
    _grant: Option<Grant>,
}

/// A drawn and scored batch, of which updates remain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Drawn {
    completions: Vec<Learned>,
    /// Updates taken.
    updates: usize,
}

/// A completion that is learned from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Learned {
    tokens: Vec<u32>,
    /// Tokens of the prompt.
    from: usize,
    #[serde(with = "state::double")]
    advantage: f64,
    #[serde(with = "state::double")]
    weight: f64,
    #[serde(with = "state::double")]
    entropy_weight: f64,
    /// ln p of each token, as it was drawn, and in the policy before the first update.
    #[serde(with = "state::bits")]
    drawn: Vec<f32>,
    #[serde(with = "state::optional_bits")]
    old: Option<Vec<f32>>,
    #[serde(with = "state::optional_bits")]
    reference: Option<Vec<f32>>,
}

impl Learned {
    fn example(&self) -> Example {
        Example { tokens: self.tokens.clone(), from: self.from }
    }
}

impl Grpo {
    /// Starts from a trainer, whose weights or adapter are the policy.
    ///
    /// # Errors
    /// The errors of [`GrpoOptions::check`]; [`TrainError::Unsupported`] for options that exclude each other, and for no reward.
    pub fn new(
        trainer: Trainer,
        rewards: Vec<WeightedReward>,
        options: GrpoOptions,
    ) -> Result<Self, GrpoError> {
        options.check()?;
        if rewards.is_empty() {
            return Err(unsupported("learn without a reward\nhint: give one with --reward"));
        }
        if trainer.engine().kv_format() != models::KvFormat::Float && options.correction.is_none() {
            return Err(unsupported(
                "draw from a KV cache in 8 bits without a correction\nhint: add --correction, or leave out --kv-cache int8",
            ));
        }
        if options.renew_reference.is_some() && !trainer.is_full() {
            return Err(unsupported(
                "renew the reference of an adapter, which is the model without it\nhint: leave out --renew-reference, or train \
                 all weights (--full)",
            ));
        }
        let filters = options.sampling.top_k != 0
            || options.sampling.top_p < 1.0
            || options.sampling.min_p > 0.0
            || options.sampling.repetition_penalty != 1.0;
        if filters && options.correction.is_none() {
            log::warn!(
                "top-k, top-p, min-p and a repetition penalty draw from another distribution than the one that is trained\nhint: \
                 add --correction"
            );
        }
        let reference = Reference::new(&trainer, &options)?;
        Ok(Self {
            options,
            rewards,
            drawn: 0,
            batch: None,
            reference,
            sequences: None,
            adapted: None,
            trainer,
        })
    }

    /// Returns the trainer, with the policy's present weights.
    pub const fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// Returns the trainer, to save it.
    pub const fn trainer_mut(&mut self) -> &mut Trainer {
        &mut self.trainer
    }

    /// Returns the options.
    pub const fn options(&self) -> &GrpoOptions {
        &self.options
    }

    /// Returns the number of batches drawn so far.
    pub const fn batches(&self) -> u64 {
        self.drawn
    }

    /// Returns true if completions are drawn by a replayed graph.
    pub fn captured(&self) -> bool {
        self.sequences.as_ref().is_some_and(|own| own.cache.captured())
    }

    /// Returns true if updates on the last batch remain.
    pub const fn has_updates(&self) -> bool {
        self.batch.is_some()
    }

    /// Reserves memory for each batch of `prompts` prompts with lengths from this list, in tokens. A batch that needs more reserves
    /// it itself.
    ///
    /// # Errors
    /// [`GrpoError::Train`] if it does not fit on the device; [`GrpoError::Generate`] for a prompt longer than the context less a
    /// completion.
    pub fn reserve(&mut self, prompts: usize, lengths: &[usize]) -> Result<(), GrpoError> {
        let (group, most) = (self.options.group, self.options.max_new_tokens);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let capacity = longest + most;
        let micro_batch = self.options.micro_batch.min(prompts * group);
        self.trainer.reserve(&Workload::new(micro_batch, capacity))?;
        // The largest prompts, each as often as it may be in a batch.
        let mut each: Vec<usize> =
            lengths.iter().map(|own| PagedCache::pages(*own, group, own + most)).collect();
        each.sort_unstable_by(|one, other| other.cmp(one));
        let times = prompts.div_ceil(lengths.len().max(1));
        let pages = each.iter().flat_map(|pages| vec![*pages; times]).take(prompts).sum();
        let fits =
            |own: &Sequences| own.cache.capacity() >= capacity && own.cache.all_pages() >= pages;
        if self.sequences.as_ref().is_some_and(fits) {
            return Ok(());
        }
        self.sequences = None;
        let engine = self.trainer.engine();
        let batch = prompts * group;
        let shared = PagedCache::shared_positions(batch, capacity, pages);
        let workload = Workload { shared: Some(shared), ..Workload::new(batch, capacity) };
        let grant = engine.admit(workload.clone())?;
        let cache = engine.paged_within(pages, &workload, prompts * longest)?;
        self.sequences = Some(Sequences { cache, _grant: grant });
        Ok(())
    }

    /// Takes all updates on one new batch. The next call draws another.
    ///
    /// # Errors
    /// The errors of [`Grpo::draw`] and [`Grpo::update`].
    pub fn step(&mut self, prompts: &[GrpoPrompt]) -> Result<Report, GrpoError> {
        let mut report = self.draw(prompts)?;
        while self.update(&mut report)? {}
        Ok(report)
    }

    /// Draws and scores completions of prompts, in place of a batch with updates that remain.
    ///
    /// # Errors
    /// [`GrpoError::Empty`], [`GrpoError::Prompt`], [`GrpoError::Generate`], [`GrpoError::Train`]; [`GrpoError::NoReward`] if
    /// every score is a fault.
    pub fn draw(&mut self, prompts: &[GrpoPrompt]) -> Result<Report, GrpoError> {
        self.batch = None;
        if prompts.is_empty() || prompts.iter().any(|own| own.tokens.is_empty()) {
            return Err(GrpoError::Empty);
        }
        let context = self.trainer.engine().config().context().unwrap_or(usize::MAX);
        let room = context.saturating_sub(self.options.max_new_tokens);
        if let Some(long) = prompts.iter().find(|own| own.tokens.len() > room) {
            let (line, tokens) = (long.line, long.tokens.len());
            return Err(GrpoError::Prompt { line, tokens, room, context });
        }
        let lengths: Vec<usize> = prompts.iter().map(|own| own.tokens.len()).collect();
        self.reserve(prompts.len(), &lengths)?;
        let renews = |every: usize| self.drawn > 0 && self.drawn.is_multiple_of(every as u64);
        if self.options.renew_reference.is_some_and(renews) {
            self.reference.renew(&self.trainer)?;
        }
        let begin = Stopwatch::start();
        let groups = self.sample(prompts)?;
        let tokens: usize = groups.iter().flatten().map(|own| learned_tokens(own).len()).sum();
        let flops = self.sample_flops(prompts, &groups);
        let sample = Phase::new(&begin, tokens, [flops; 2]);
        let mut phases = Phases { sample, ..Phases::default() };

        let begin = Stopwatch::start();
        let (mut report, advantages) = self.scored(prompts, &groups)?;
        self.drawn += 1;
        phases.reward = Phase::new(&begin, groups.len() * self.options.group, [0; 2]);
        let mut batch = self.learned(prompts, &groups, &advantages);
        let drawing = report.drawing.as_mut().expect("it was just sampled");
        drawing.learned = batch.len();
        if drawing.reward.is_none() {
            log::warn!("nothing is learned from the batch: no completion has a score");
        } else if batch.is_empty() {
            log::warn!(
                "nothing is learned from the batch: the rewards of each group are equal, or its completions are masked\nhint: use \
                 harder or easier prompts, a higher --temperature, a larger --group, or longer completions"
            );
        }
        if self.options.beta != 0.0 && !batch.is_empty() {
            let begin = Stopwatch::start();
            let examples: Vec<_> = batch.iter().map(Learned::example).collect();
            let (size, temperature) = (self.options.micro_batch, self.temperature());
            let own = self.reference.measure(&mut self.trainer, &examples, size, temperature)?;
            batch.iter_mut().zip(own).for_each(|(own, reference)| own.reference = Some(reference));
            phases.reference = self.measuring(&begin, &examples);
        }
        if self.options.needs_old() && !batch.is_empty() {
            let begin = Stopwatch::start();
            let examples: Vec<_> = batch.iter().map(Learned::example).collect();
            let temperature = self.temperature();
            let old = measured(&examples, self.options.micro_batch, temperature, |batch| {
                self.trainer.measured(batch)
            })?;
            batch.iter_mut().zip(old).for_each(|(own, old)| own.old = Some(old));
            phases.old = self.measuring(&begin, &examples);
        }
        report.phases = phases;
        self.batch = (!batch.is_empty()).then_some(Drawn { completions: batch, updates: 0 });
        Ok(report)
    }

    /// Takes one update on the batch, and adds its numbers to the report. Returns true if more remain.
    ///
    /// # Errors
    /// [`GrpoError::Train`].
    pub fn update(&mut self, report: &mut Report) -> Result<bool, GrpoError> {
        let Some(mut batch) = self.batch.take() else { return Ok(false) };
        let begin = Stopwatch::start();
        let micro_batches = self.micro_batches(&batch);
        let all = micro_batches.iter().map(|batch| Ok(batch.clone()));
        let made = self.trainer.learn(all, || true);
        let (metrics, stats) = match made {
            Ok(made) => made.expect("nothing stops it"),
            Err(why) => {
                self.batch = Some(batch);
                return Err(why.into());
            }
        };
        let (log_probability, entropy) = self.trainer.token_numbers(stats)?;
        let (mut sums, mut from) = (Sums::default(), 0);
        for own in &batch.completions {
            let to = from + own.drawn.len();
            sums.add(own, &log_probability[from..to], &entropy[from..to]);
            from = to;
        }
        batch.updates += 1;
        report.take(&sums, metrics, batch.updates);
        let flops = [metrics.model_flops, metrics.device_flops];
        report.phases.learn.add(&Phase::new(&begin, sums.tokens(), flops));
        if batch.updates < self.options.updates {
            self.batch = Some(batch);
        }
        Ok(self.batch.is_some())
    }

    /// Returns the operations of sampling, with one prefill of each prompt.
    fn sample_flops(&self, prompts: &[GrpoPrompt], groups: &[Vec<Completion>]) -> u64 {
        let of = |(prompt, group): (&GrpoPrompt, &Vec<Completion>)| {
            let first = prompt.tokens.len();
            let lengths = || group.iter().map(|own| own.tokens.len());
            let scores: usize = lengths().map(|len| (first + len).pow(2) - first.pow(2)).sum();
            [first + lengths().sum::<usize>(), first.pow(2) + scores]
        };
        let each = prompts.iter().zip(groups).map(of);
        let [rows, scores] =
            each.fold([0, 0], |[rows, scores], own| [rows + own[0], scores + own[1]]);
        self.trainer.forward_flops(rows, scores)
    }

    /// Returns the phase of a forward pass over examples.
    fn measuring(&self, begin: &Stopwatch, examples: &[Example]) -> Phase {
        let rows = examples.iter().map(Example::rows).sum();
        let scores = examples.iter().map(|own| own.rows().pow(2)).sum();
        let flops = self.trainer.forward_flops(rows, scores);
        let tokens = examples.iter().map(Example::learned).sum();
        Phase::new(begin, tokens, [flops; 2])
    }

    fn temperature(&self) -> f64 {
        f64::from(self.options.sampling.temperature)
    }

    /// Draws the completions of each prompt.
    fn sample(&mut self, prompts: &[GrpoPrompt]) -> Result<Vec<Vec<Completion>>, GrpoError> {
        let decoder = self.trainer.policy_decoder(&mut self.adapted)?;
        let engine = self.trainer.engine();
        let request = |at: usize| Request {
            sampling: Sampling {
                seed: mixed(&[self.options.sampling.seed, self.drawn, at as u64]),
                ..self.options.sampling
            },
            max_new_tokens: Some(self.options.max_new_tokens),
            stop_tokens: match &self.options.stop_tokens {
                Some(stops) => stops.clone(),
                None => engine.request().stop_tokens,
            },
            stop_sequences: Vec::new(),
        };
        let requests: Vec<Request> = (0..prompts.len()).map(request).collect();
        let asked: Vec<_> = prompts
            .iter()
            .zip(&requests)
            .map(|(own, request)| (&own.tokens[..], request))
            .collect();
        let cache = &mut self.sequences.as_mut().expect("just reserved").cache;
        let size = (self.options.group, self.options.max_new_tokens);
        Ok(engine.generate_with(decoder, cache, &asked, size)?)
    }

    /// Scores completions.
    fn scored(
        &self,
        prompts: &[GrpoPrompt],
        groups: &[Vec<Completion>],
    ) -> Result<(Report, Advantages), GrpoError> {
        let drawn: Vec<Vec<u32>> = groups
            .iter()
            .flatten()
            .map(|own| learned_tokens(own).into_iter().map(|token| token.0).collect())
            .collect();
        let flat: Vec<(&GrpoPrompt, &Completion)> = prompts
            .iter()
            .zip(groups)
            .flat_map(|(prompt, group)| group.iter().map(move |own| (prompt, own)))
            .collect();
        let completions: Vec<Scored<'_>> = flat
            .iter()
            .zip(&drawn)
            .map(|((prompt, own), tokens)| Scored {
                prompt: &prompt.text,
                completion: own.text.as_deref().unwrap_or_default(),
                tokens,
                truncated: is_truncated(own),
                line: prompt.line,
                fields: &prompt.fields,
            })
            .collect();
        let mut scores = vec![Vec::new(); completions.len()];
        let (mut faults, mut each) = (Vec::new(), Vec::new());
        for WeightedReward { name, reward, .. } in &self.rewards {
            let own = reward.score_all(&completions);
            let mut values = Vec::new();
            for ((score, scores), completion) in own.into_iter().zip(&mut scores).zip(&completions)
            {
                scores.push(match score {
                    Ok(score) => {
                        values.extend(score);
                        score
                    }
                    Err(why) => {
                        let (line, prompt) = (completion.line, completion.prompt.to_owned());
                        faults.push(RewardFault { function: name.clone(), line, prompt, why });
                        None
                    }
                });
            }
            each.push(RewardReport::new(name.clone(), &values));
        }
        if scores.iter().flatten().all(Option::is_none) && !faults.is_empty() {
            return Err(GrpoError::NoReward(Box::new(faults.remove(0))));
        }
        for RewardFault { function, line, prompt, why } in &faults {
            let prompt: String = prompt.chars().take(60).collect();
            log::warn!(
                "{function}: {why} (prompt of line {line}: {prompt:?}); the completion has no score of it"
            );
        }
        let weights: Vec<f64> = self.rewards.iter().map(|own| own.weight).collect();
        let advantages = Advantages::new(&scores, &weights, self.options.group, self.options.scale);
        let report = Report::new(self.drawn + 1, &completions, &advantages, each, faults);
        Ok((report, advantages))
    }

    /// Returns the completions that have something to learn from.
    fn learned(
        &self,
        prompts: &[GrpoPrompt],
        groups: &[Vec<Completion>],
        advantages: &Advantages,
    ) -> Vec<Learned> {
        let options = &self.options;
        let flat = prompts.iter().zip(groups).flat_map(|(prompt, group)| {
            group.iter().map(move |own| (prompt, own, learned_tokens(own)))
        });
        let scored: Vec<_> = flat
            .zip(&advantages.values)
            .filter_map(|(own, advantage)| Some((own, (*advantage)?)))
            .collect();
        let counts = |own: &Completion| !(options.mask_truncated && is_truncated(own));
        // A masked completion counts among completions, and none of its tokens count.
        let lengths: Vec<usize> = scored
            .iter()
            .map(|((_, own, tokens), _)| if counts(own) { tokens.len() } else { 0 })
            .collect();
        let weights = options.loss.weights(&lengths, options.max_new_tokens);
        let entropies = LossKind::Dapo.weights(&lengths, options.max_new_tokens);
        let learns_anyway = options.beta != 0.0 || options.entropy != 0.0;
        scored
            .into_iter()
            .zip(weights)
            .zip(entropies)
            .filter(|((((_, own, tokens), advantage), _), _)| {
                !tokens.is_empty() && counts(own) && (*advantage != 0.0 || learns_anyway)
            })
            .map(|((((prompt, _, tokens), advantage), weight), entropy)| Learned {
                tokens: prompt
                    .tokens
                    .iter()
                    .copied()
                    .chain(tokens.iter().map(|own| own.0))
                    .collect(),
                from: prompt.tokens.len(),
                advantage,
                weight,
                entropy_weight: options.entropy * entropy,
                drawn: tokens.iter().map(|own| own.1).collect(),
                old: None,
                reference: None,
            })
            .collect()
    }

    fn micro_batches(&self, batch: &Drawn) -> Vec<MicroBatch> {
        let options = &self.options;
        let sequence = |own: &Learned| PolicySequence {
            advantage: own.advantage,
            weight: own.weight,
            entropy_weight: own.entropy_weight,
            correction: options.correction.map(|correction| {
                let old = own.old.as_ref().expect("a corrected batch has them");
                correction.factors(old, &own.drawn)
            }),
            old: own.old.clone().filter(|_| options.updates > 1),
            reference: own.reference.clone(),
        };
        let of = |part: &[Learned]| MicroBatch {
            examples: part.iter().map(Learned::example).collect(),
            policy: Some(Policy {
                rule: options.rule(),
                sequences: part.iter().map(sequence).collect(),
            }),
        };
        batch.completions.chunks(options.micro_batch).map(of).collect()
    }
}

fn unsupported(what: &'static str) -> GrpoError {
    TrainError::Unsupported(what).into()
}

/// Returns the tokens of a completion with their log-probabilities, and with the token that ended it.
fn learned_tokens(own: &Completion) -> Vec<(u32, f32)> {
    own.tokens.iter().chain(&own.stop).map(|token| (token.id, token.drawn_logprob)).collect()
}

/// Returns true if a completion ended because it was too long.
const fn is_truncated(own: &Completion) -> bool {
    matches!(own.finish_reason, FinishReason::Length | FinishReason::Context)
}

/// Measures examples in micro-batches, and returns the numbers of each.
fn measured<E>(
    examples: &[Example],
    micro_batch: usize,
    temperature: f64,
    mut measure: impl FnMut(Batch<'_>) -> Result<Vec<f32>, E>,
) -> Result<Vec<Vec<f32>>, E> {
    let mut all = Vec::new();
    for part in examples.chunks(micro_batch) {
        let numbers = measure(Batch::measured(part, temperature))?;
        let mut rest = &numbers[..];
        for example in part {
            let (own, others) = rest.split_at(example.learned());
            all.push(own.to_vec());
            rest = others;
        }
    }
    Ok(all)
}

/// Mixes words into a seed (SplitMix64).
fn mixed(words: &[u64]) -> u64 {
    words.iter().fold(0, |state: u64, word| {
        let mut z = state.wrapping_add(*word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
