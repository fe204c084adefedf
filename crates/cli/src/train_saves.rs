//! Folders that `flashover train` saves into and resumes from.
//!
//! | Option | Folder |
//! |---|---|
//! | | the output folder |
//! | `--keep` | `step-NNNNNN` in the output folder after every `--save-every` steps, and the output folder at the end |

use std::io::{self, ErrorKind, IsTerminal};
use std::path::{Path, PathBuf};
use std::{env, fs, process};

use anyhow::bail;
use command::OutFile;
use flashover::ModelFolder;
use flashover::train::{Adapter, SavedRun, TrainError, Trainer};
use serde_json::Value;

use crate::model_args::{Subject, all_spared};
use crate::train_args::Args;

const PREFIX: &str = "step-";

/// Reads the run to resume.
pub(crate) fn saved_run(args: &Args) -> anyhow::Result<Option<SavedRun>> {
    let Some(folder) = &args.resume else { return Ok(None) };
    match SavedRun::open(folder) {
        Ok(run) => Ok(Some(run)),
        Err(why) => match steps_in(folder).unwrap_or_default().pop() {
            Some((_, last)) => {
                bail!(
                    "{} has its run in folders of steps\nhint: use --resume {}",
                    folder.display(),
                    last.display()
                )
            }
            None => Err(why.into()),
        },
    }
}

/// Returns true if the run goes on in the folder that it was saved in.
pub(crate) fn resumes_in_place(args: &Args) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    let Some(output) = real(&args.output) else { return false };
    let Some(resume) = args.resume.as_deref().and_then(real) else { return false };
    resume == output || (step_of(&resume).is_some() && resume.parent() == Some(&output))
}

/// Returns the files that a save writes or removes, in a folder.
fn saved_files(
    args: &Args,
    folder: Option<&ModelFolder>,
    into: &Path,
) -> anyhow::Result<Vec<PathBuf>> {
    let run = SavedRun::files(into);
    if !args.training.full {
        return Ok(Adapter::files(into).into_iter().chain(run).collect());
    }
    const OWN: [&str; 3] = ["config.json", "model.safetensors", "model.safetensors.index.json"];
    let own = || OWN.map(PathBuf::from).to_vec();
    let files = folder.map_or_else(|| Ok(own()), ModelFolder::trained_files)?;
    Ok(files.into_iter().map(|file| into.join(file)).chain(run).collect())
}

/// Refuses to replace files of an earlier result, or files of others.
pub(crate) fn check_output(
    args: &Args,
    folder: Option<&ModelFolder>,
    saved: Option<&SavedRun>,
) -> anyhow::Result<()> {
    let output = &args.output;
    let refused = |what: &str| -> anyhow::Result<()> {
        bail!(
            "{} has {what}\nhint: replace it with --overwrite, or choose another --output",
            output.display()
        )
    };
    if resumes_in_place(args) {
        let later = |saved: &SavedRun| match SavedRun::open(output) {
            Ok(own) => own.done > saved.done,
            Err(_) => false,
        };
        return match saved.is_some_and(later) {
            true => refused("a later save than the one to resume from"),
            false => Ok(()),
        };
    }
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut there = saved_files(args, folder, output)?;
    there.retain(|file| file.exists());
    let names: Vec<_> = there.iter().map(|file| name(file)).collect();
    let has = |start: &str| names.iter().any(|name| name.starts_with(start));
    match names.first() {
        _ if has("adapter_") => refused("an adapter"),
        _ if has("config.json") || has("model.safetensors") => refused("a model"),
        _ if has("flashover_run") => refused("a training run"),
        Some(other) => refused(&format!("another {other}")),
        None if args.keep.is_some() && steps_in(output).is_ok_and(|steps| !steps.is_empty()) => {
            refused("saved steps")
        }
        None => Ok(()),
    }
}

/// Refuses a log, a page or a trace in place of a file that training reads or saves.
pub(crate) fn check_outputs<'a>(
    args: &Args,
    folder: Option<&ModelFolder>,
    outputs: impl Iterator<Item = &'a OutFile>,
) -> anyhow::Result<()> {
    let mut taken = saved_files(args, folder, &args.output)?;
    taken.extend(Adapter::files(&args.output));
    for folder in args.resume.iter().chain(&args.adapter) {
        taken.extend(Adapter::files(folder).into_iter().chain(SavedRun::files(folder)));
    }
    for (_, step) in steps_in(&args.output).unwrap_or_default() {
        taken.extend(saved_files(args, folder, &step)?);
    }
    taken.extend([&args.data].into_iter().chain(&args.held_out).cloned());
    taken.extend(folder.map(ModelFolder::files).unwrap_or_default());
    if let Some(Subject::Folder(named)) =
        args.of.is_named().then(|| args.of.subject()).transpose()?
    {
        taken.extend(saved_files(args, None, &named)?);
    }
    for file in outputs {
        all_spared(taken.iter().cloned(), file)?;
    }
    Ok(())
}

/// Returns the largest number of saves on the disk at once.
pub(crate) fn saves_at_once(args: &Args) -> u64 {
    match (args.keep, args.save_every) {
        (Some(keep), _) => u64::from(keep) + 1,
        // The new one, next to the one that it replaces.
        (None, Some(_)) => 2,
        (None, None) => 1,
    }
}

/// Saves into a folder of the step in the output folder, and removes the saves of this run but the last `keep`.
pub(crate) fn keep_last(
    trainer: &mut Trainer,
    output: &Path,
    keep: usize,
    run: &Value,
) -> Result<(), TrainError> {
    let done = trainer.done();
    let own = output.join(format!("{PREFIX}{done:06}"));
    let is_empty = |path: &Path| fs::read_dir(path).is_ok_and(|mut all| all.next().is_none());
    if own.exists() && !is_empty(&own) && SavedRun::open(&own).is_err() {
        return Err(folder_error(&own, ErrorKind::AlreadyExists.into()));
    }
    trainer.checkpoint_into(&mut Adapter::begin(&own)?, run)?;
    let all = steps_in(output).map_err(|why| folder_error(output, why))?;
    // Later ones are of another run.
    let old: Vec<_> = all.into_iter().filter(|(step, _)| *step <= done).collect();
    for (_, old) in &old[..old.len().saturating_sub(keep)] {
        fs::remove_dir_all(old).map_err(|why| folder_error(old, why))?;
    }
    Ok(())
}

/// Returns the step of a folder's name.
fn step_of(path: &Path) -> Option<usize> {
    let step = path.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    let digits = step.len() >= 6 && step.bytes().all(|byte| byte.is_ascii_digit());
    step.parse().ok().filter(|_| digits)
}

/// Returns the folders of steps that have a run, in their order.
fn steps_in(folder: &Path) -> io::Result<Vec<(usize, PathBuf)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if let Some(step) = step_of(&path).filter(|_| SavedRun::open(&path).is_ok()) {
            all.push((step, path));
        }
    }
    all.sort();
    Ok(all)
}

fn folder_error(path: &Path, why: io::Error) -> TrainError {
    TrainError::Folder { path: path.to_owned(), why }
}

/// Saves elsewhere after the output folder could not be written: into a folder that the user names at a terminal,
/// otherwise next to the output folder or into the folder for temporary files. `run` is present if the run can be resumed.
/// Returns the error `why` unless the user named a folder.
pub(crate) fn rescue(
    trainer: &mut Trainer,
    what: &str,
    output: &Path,
    run: Option<&Value>,
    why: TrainError,
) -> Result<(), TrainError> {
    if !matches!(why, TrainError::Model(_)) {
        return Err(why);
    }
    let steps = command::count(trainer.done(), "step");
    let mut save = |folder: &Path| {
        let mut folder = Adapter::begin(folder)?;
        match run {
            Some(run) => trainer.checkpoint_into(&mut folder, run),
            None => trainer.save_into(&mut folder),
        }
    };
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        command::note!("{why}");
        loop {
            command::note!(
                "type another folder for the {what} after {steps}, or nothing to discard it:"
            );
            let mut line = String::new();
            // An unreadable answer counts as none.
            let read = io::stdin().read_line(&mut line).unwrap_or(0);
            let folder = line.trim();
            if read == 0 || folder.is_empty() {
                break;
            }
            match save(Path::new(folder)) {
                Ok(()) => {
                    command::note!("the {what} after {steps} is in {folder}");
                    return Ok(());
                }
                Err(why) => command::note!("{why}"),
            }
        }
        return Err(why);
    }
    // An earlier rescue stays.
    let beside = |number: usize| {
        let mut path = output.as_os_str().to_owned();
        path.push(if number == 1 { ".rescued".to_owned() } else { format!(".rescued-{number}") });
        PathBuf::from(path)
    };
    let beside = (1..).map(beside).find(|path| !path.exists()).unwrap_or_default();
    let temporary = env::temp_dir().join(format!("flashover-{what}-{}", process::id()));
    for folder in [beside, temporary] {
        match save(&folder) {
            Ok(()) => {
                command::note!("the {what} after {steps} is in {}", folder.display());
                break;
            }
            Err(why) => command::note!("warning: the {what} is not saved: {why}"),
        }
    }
    Err(why)
}
