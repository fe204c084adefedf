//! Checks a model at its memory limit. A sequence is refused, or the device cannot allocate it. Afterwards the model
//! must give the same results as before and hold no more memory.

use std::collections::BTreeMap;

use arch::{Backend, Device};
use cubecl::server::Handle;
use flashover::memory::{MemoryBudget, PlanError, Workload};
use flashover::{DeviceError, Engine, EngineOptions, GenerateError, Policy};
use reference::Comparison;
use serde_json::json;
use suite::{CheckError, Job, Verdict};

/// A shape small enough for any card.
const SHAPE: &str = "llama-3.2-1b";
/// Length of a sequence that fits, and of one whose keys and values take 4 GiB, in tokens.
const SHORT: usize = 64;
const LONG: usize = 131_072;
/// Memory left free on a full device, in bytes. Short sequences need less.
const LEFT: u64 = 512 << 20;

pub(super) fn jobs(device: &Device, exhaust: bool) -> Vec<Job> {
    let of =
        |case: &str, run: fn(&Device) -> Result<Verdict, CheckError>, lacks: Option<&str>| Job {
            op: "memory",
            params: BTreeMap::from([("case".to_owned(), case.into())]),
            config: lacks.map_or(Ok(json!({})), |lacks| Err(lacks.to_owned())),
            programs: None,
            run: Box::new(run),
        };
    let host = device.backend() == Backend::Cpu || arch::report::describe(device).software;
    let small =
        host.then_some("a CPU is too slow for a model of this size; its tests use a smaller one");
    let mut jobs = vec![of("limit", limited, small)];
    if exhaust {
        let told =
            (device.backend() != Backend::Cuda).then_some("the driver does not report free memory");
        jobs.push(of("exhausted", exhausted, told));
    }
    jobs
}

/// The budget allows one short sequence. A long one must be refused before anything is allocated.
fn limited(device: &Device) -> Result<Verdict, CheckError> {
    let (device, policy) = (&flashover::Device::from(device.clone()), Some(Policy::Default));
    let options = EngineOptions { policy, ..EngineOptions::default() };
    let engine = Engine::random(device, SHAPE, &options, |_| {}).map_err(failed)?;
    let plan = engine.plan(Workload::new(1, SHORT)).map_err(failed)?;
    drop(engine);
    let limit_bytes = Some(plan.peak_bytes());
    let budget = MemoryBudget { limit_bytes, ..MemoryBudget::default() };
    let before = flashover::memory::MemoryUsage::read(device).used_bytes;
    let engine = Engine::random(device, SHAPE, &EngineOptions { budget, ..options }, |_| {})
        .map_err(failed)?;
    let want = logits(&engine, SHORT).map_err(failed)?;
    let held = used_after_clearing(&engine)?;
    for _ in 0..3 {
        match logits(&engine, LONG) {
            Err(GenerateError::Plan(PlanError::Memory(_))) => {}
            other => return Err(unlike("a plan error", other)),
        }
        same(held, used_after_clearing(&engine)?, "after a refusal")?;
    }
    let verdict = equal(&logits(&engine, SHORT).map_err(failed)?, &want)?;
    drop(engine);
    same(
        before,
        flashover::memory::MemoryUsage::read(device).used_bytes,
        "after a model was dropped",
    )?;
    Ok(verdict)
}

/// Other allocations fill the card. A sequence that does not fit must fail with an out-of-memory error.
fn exhausted(device: &Device) -> Result<Verdict, CheckError> {
    let options = EngineOptions { policy: Some(Policy::Default), ..EngineOptions::default() };
    let engine = Engine::random(&device.clone().into(), SHAPE, &options, |_| {}).map_err(failed)?;
    let want = logits(&engine, SHORT).map_err(failed)?;
    let held = used_after_clearing(&engine)?;
    let others = take(device, free(device)?.saturating_sub(LEFT));
    let held_and_taken = used_after_clearing(&engine)?;
    let left = free(device)?;
    if left > 2 * LEFT {
        return Err(CheckError::Kernel(format!(
            "{left} bytes are free although the rest was allocated"
        )));
    }
    match logits(&engine, LONG) {
        Err(GenerateError::Device(DeviceError::OutOfMemory { .. })) => {}
        other => return Err(unlike("an out-of-memory error", other)),
    }
    same(held_and_taken, used_after_clearing(&engine)?, "after an out-of-memory error")?;
    let meanwhile = equal(&logits(&engine, SHORT).map_err(failed)?, &want)?;
    if !meanwhile.comparison.passed {
        return Ok(meanwhile);
    }
    drop(others);
    same(held, used_after_clearing(&engine)?, "after other allocations were freed")?;
    // The long sequence fits once the other allocations are freed.
    equal(&logits(&engine, LONG).map_err(failed)?, &want)
}

/// Allocates `bytes` bytes of the device, in separate pages.
fn take(device: &Device, bytes: u64) -> Vec<Handle> {
    const PIECE: u64 = 1 << 30;
    let client = device.client();
    let piece =
        |size: u64| client.memory_persistent_allocation((), |()| client.empty(size as usize));
    (0..bytes.div_ceil(PIECE)).map(|i| piece(PIECE.min(bytes - i * PIECE))).collect()
}

/// Logits of a few tokens in a sequence with space for `positions` positions.
fn logits(engine: &Engine, positions: usize) -> Result<Vec<f32>, GenerateError> {
    let tokens: Vec<u32> = (0..24).map(|at| at * 7919 % engine.config().vocab as u32).collect();
    engine.session(positions)?.logits(&tokens)
}

/// Bytes in use after the caches have been freed.
fn used_after_clearing(engine: &Engine) -> Result<u64, CheckError> {
    engine.clear_cache().map_err(failed)?;
    Ok(engine.memory().used_bytes)
}

/// Free memory of the card, in bytes.
fn free(device: &Device) -> Result<u64, CheckError> {
    let none = || CheckError::Kernel("the driver does not report free memory".to_owned());
    flashover::memory::free_bytes(&device.clone().into()).ok_or_else(none)
}

fn same(before: u64, after: u64, what: &str) -> Result<(), CheckError> {
    match before == after {
        true => Ok(()),
        false => Err(CheckError::Kernel(format!("{what}: {after} bytes in use, not {before}"))),
    }
}

fn unlike<T>(want: &str, have: Result<T, GenerateError>) -> CheckError {
    let have = have.map_or_else(|why| why.to_string(), |_| "logits".to_owned());
    CheckError::Kernel(format!("expected {want}, got: {have}"))
}

fn equal(out: &[f32], want: &[f32]) -> Result<Verdict, CheckError> {
    if want.iter().any(|logit| !logit.is_finite()) {
        return Err(CheckError::Kernel("logits are not finite".to_owned()));
    }
    let want: Vec<f64> = want.iter().copied().map(f64::from).collect();
    let bytes: Vec<u8> = out.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    let comparison = Comparison::within(out, &want, 0.0)?;
    Ok(Verdict { comparison, digest: suite::fnv1a(&bytes) })
}

fn failed(why: impl ToString) -> CheckError {
    CheckError::Kernel(why.to_string())
}
