//! Arguments that choose a device and a model, and load it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::io::{self, IsTerminal};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::builder::{PossibleValue, TypedValueParser};
use command::OutFile;
use flashover::bench::SpeedTest;
use flashover::bench::trace::{AlreadyRecording, Recording};
use flashover::device::ArchProfile;
use flashover::hub::{Hub, HubError, ModelName, Progress};
use flashover::memory::{MemoryBudget, Plan, Preset, Workload};
use flashover::{
    Backend, Compute, Device, Engine, EngineOptions, KvFormat, LoadError, LoadProgress,
    ModelFolder, OpenError, Policy, WeightFormat,
};
use indicatif::{ProgressBar, ProgressStyle};

use crate::panics;

/// Parses an argument; shells complete its names, and its help says them in its own words.
pub(crate) fn named<T>(
    names: impl IntoIterator<Item = &'static str>,
    parse: fn(&str) -> Result<T, String>,
) -> impl TypedValueParser<Value = T>
where
    T: Clone + Send + Sync + 'static,
{
    let names = names.into_iter().map(PossibleValue::new).collect();
    Named { names, parse }
}

/// Parses with the type's own parser, like [`named`].
pub(crate) fn choice<T>(
    names: impl IntoIterator<Item = &'static str>,
) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: fmt::Display> + Clone + Send + Sync + 'static,
{
    named(names, |text| text.parse().map_err(|why: T::Err| why.to_string()))
}

#[derive(Clone)]
struct Named<T> {
    names: Vec<PossibleValue>,
    parse: fn(&str) -> Result<T, String>,
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Named<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        self.parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.names.iter().cloned()))
    }
}

/// Choice of the device.
#[derive(clap::Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// Backend: cuda, vulkan, webgpu or cpu [default: the one that `flashover doctor` lists under `chosen`]
    #[arg(long, value_parser = choice::<Backend>(Backend::ALL.map(Backend::name)), hide_possible_values = true)]
    backend: Option<Backend>,
    /// Index of the device among those of the backend, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: usize,
    /// Maximum number of CPU cores [default: all that the process may use]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Restrict the device to the capabilities of a recorded GPU, such as rtx4090; also selects its backend
    #[arg(long, value_parser = choice::<String>(ArchProfile::cards()), hide_possible_values = true)]
    profile: Option<String>,
}

/// Download options for models that are not local folders.
#[derive(clap::Args)]
pub(crate) struct HubArgs {
    /// Use only files that were downloaded before, like HF_HUB_OFFLINE=1
    #[arg(long)]
    offline: bool,
}

/// Choice of the model, and load options.
#[derive(clap::Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Folder with config.json and safetensors, or owner/name[@revision] on the Hugging Face Hub
    #[arg(long, short)]
    model: PathBuf,
    /// Folder with a LoRA adapter in PEFT format, merged into dense weights but not into 4-bit or 8-bit ones
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    hub: HubArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// Choice of a model or of a shape with random weights, and load options.
#[derive(clap::Args)]
#[command(next_help_heading = "Model")]
#[group(id = "subject", required = true, multiple = false, args = ["model", "shape"])]
pub(crate) struct SubjectArgs {
    /// Folder with config.json and safetensors, or owner/name[@revision] on the Hugging Face Hub
    #[arg(long, short)]
    model: Option<PathBuf>,
    /// Published model shape to fill with random weights, such as llama-3-8b, or a config.json
    #[arg(long, value_parser = choice::<String>(Engine::shapes()), hide_possible_values = true)]
    shape: Option<String>,
    #[command(flatten)]
    hub: HubArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// A model folder, or the name of a shape with random weights.
pub(crate) enum Subject<'a> {
    Folder(PathBuf),
    Shape(&'a str),
}

/// Load options of a model.
#[derive(clap::Args)]
pub(crate) struct LoadArgs {
    /// Compute dtype: f32, tf32, f16 or bf16 [default: the dtype of the files, or f32 on a CPU or if the device lacks
    /// it]
    #[arg(long, value_parser = named(["f32", "tf32", "f16", "bf16"], dtype), hide_possible_values = true)]
    dtype: Option<Compute>,
    #[arg(long, value_parser = named(WeightFormat::at_load().map(WeightFormat::name), quant), hide_possible_values = true, help = quant_help())]
    quant: Option<WeightFormat>,
    /// Format of the KV cache: float (the compute dtype) or int8
    #[arg(long, default_value = "float", value_parser = named(KvFormat::ALL.map(KvFormat::name), kv_format), hide_possible_values = true)]
    kv_cache: KvFormat,
    /// Quantise prefill activations to int8 for matmuls with 8-bit weights, except outlier columns; CUDA only, less
    /// exact, and faster only if outliers are rare
    #[arg(long)]
    int8_activations: bool,
    /// Maximum context length in tokens, even beyond config.json [default: that of config.json, extended by RoPE
    /// scaling]
    #[arg(long, value_name = "TOKENS")]
    max_context: Option<NonZeroUsize>,
    /// For untuned shapes: `frozen` fails, `default` uses an inherited or the first config, `measure` tunes now
    #[arg(long, default_value = "default", value_parser = choice::<Policy>(Policy::ALL.map(Policy::name)), hide_possible_values = true)]
    policy: Policy,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    budget: BudgetArgs,
}

/// Limits on the use of the device's memory.
#[derive(clap::Args)]
#[command(next_help_heading = "Memory")]
struct BudgetArgs {
    /// Maximum memory to use, such as 14GiB or 512MiB [default: no limit]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = size)]
    memory_limit: Option<u64>,
    /// Memory to leave free for other programs, such as 2GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = size, default_value = "0")]
    memory_reserve: u64,
    /// Maximum fraction of the device's memory to use, above 0 and up to 1
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, allow_negative_numbers = true)]
    memory_fraction: f64,
}

/// Choice of precision by use.
#[derive(clap::Args)]
pub(crate) struct PresetArgs {
    /// Choose the precision that suits a use and fits the device, unless --quant is given: code-generation, inference
    /// or latency
    #[arg(long, value_parser = choice::<Preset>(Preset::ALL.map(Preset::name)), hide_possible_values = true)]
    pub(crate) preset: Option<Preset>,
}

/// Choice of a trace file.
#[derive(clap::Args)]
pub(crate) struct TraceArgs {
    /// Write a trace for Perfetto: all spans and memory readings, but kernels only of the first step and the first prefill, if
    /// any; for all kernels use `flashover profile --trace`
    #[arg(long, value_name = "FILE")]
    profile_trace: Option<PathBuf>,
}

/// A recording and its output file, if a trace is requested.
pub(crate) struct Tracing(Option<(OutFile, Recording)>);

impl TraceArgs {
    /// Checks that the file can be written, before the work starts.
    pub(crate) fn file(&self) -> anyhow::Result<Option<OutFile>> {
        Ok(self.profile_trace.as_deref().map(OutFile::new).transpose()?)
    }
}

impl Tracing {
    /// Starts with a memory reading, so that viewers draw memory from the beginning.
    pub(crate) fn start(file: Option<OutFile>, engine: &Engine) -> anyhow::Result<Self> {
        let started = file.map(|file| Ok::<_, AlreadyRecording>((file, Recording::brief()?)));
        let started = started.transpose()?;
        engine.note_memory();
        Ok(Self(started))
    }

    pub(crate) fn finish(self, engine: &Engine) -> anyhow::Result<()> {
        if let Some((file, recording)) = self.0 {
            file.write(recording.finish().chrome(&engine.device().profile().name).as_bytes())?;
        }
        Ok(())
    }
}

/// Parses a size in bytes: `14GiB`, `512 MiB`, `2GB`, `1.5G` or `4096`. `GiB` is 2^30 bytes, `G` and `GB` are 10^9.
fn size(text: &str) -> Result<u64, String> {
    let bad =
        || format!("expected a size, got `{text}`\nhint: use a size such as 14GiB, 512MiB or 4096");
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let scale: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0f64.powi(2),
        "gib" => 1024.0f64.powi(3),
        "tib" => 1024.0f64.powi(4),
        _ => return Err(bad()),
    };
    let bytes = number.parse::<f64>().map_err(|_| bad())? * scale;
    // No device has more memory.
    if !(0.0..=1e18).contains(&bytes) {
        return Err(bad());
    }
    Ok(bytes.round() as u64)
}

fn dtype(text: &str) -> Result<Compute, String> {
    match text {
        "f32" => Ok(Compute::F32),
        "tf32" => Ok(Compute::Tf32),
        "f16" => Ok(Compute::F16),
        "bf16" => Ok(Compute::Bf16),
        _ => Err(format!("unknown dtype `{text}`\nhint: use one of f32, tf32, f16, bf16")),
    }
}

fn quant(text: &str) -> Result<WeightFormat, String> {
    let known = || WeightFormat::alternatives(WeightFormat::at_load());
    let bad = || format!("unknown quantisation `{text}`\nhint: use {}", known());
    WeightFormat::at_load().find(|quant| quant.name() == text).ok_or_else(bad)
}

fn quant_help() -> String {
    let known = WeightFormat::alternatives(WeightFormat::at_load());
    format!("Quantise the weights of the layers at load: {known} [default: as in the files]")
}

fn kv_format(text: &str) -> Result<KvFormat, String> {
    let bad = || format!("unknown KV cache format `{text}`\nhint: use float or int8");
    KvFormat::ALL.into_iter().find(|format| format.name() == text).ok_or_else(bad)
}

/// Creates a progress bar, hidden if standard error is not a terminal.
pub(crate) fn bar(template: &str) -> anyhow::Result<ProgressBar> {
    // A bar of length 0 would be full before the work starts.
    let bar = match io::stderr().is_terminal() {
        true => ProgressBar::no_length(),
        false => ProgressBar::hidden(),
    };
    bar.set_style(ProgressStyle::with_template(template)?);
    bar.enable_steady_tick(Duration::from_millis(100));
    Ok(bar)
}

impl DeviceArgs {
    pub(crate) fn open(&self) -> anyhow::Result<Device> {
        let backend = match (self.backend, &self.profile) {
            (Some(backend), _) => Some(backend),
            (None, Some(profile)) => Some(ArchProfile::recorded(profile)?.backend),
            (None, None) => None,
        };
        if let Some(threads) = self.threads {
            let used = flashover::limit_threads(threads);
            if used < threads.get() {
                command::note!("note: {used} threads are used: the process may use {used} cores");
            }
        }
        let device = match backend {
            Some(backend) => Device::open_nth(backend, self.device)?,
            None if self.device > 0 => bail!("--device needs a backend\nhint: add --backend cuda"),
            None => panics::expected(Device::auto)?,
        };
        Ok(match &self.profile {
            Some(profile) => device.restrict(profile)?,
            None => device,
        })
    }
}

impl HubArgs {
    /// Returns the folder of a model: `model` itself, or the downloaded folder if `model` is a name on the Hub.
    pub(crate) fn model(&self, model: &Path) -> anyhow::Result<PathBuf> {
        self.folder(model, |hub, name, progress| hub.model(name, progress))
    }

    /// Returns a folder with the model's tokenizer, like [`HubArgs::model`] without the weights.
    pub(crate) fn tokenizer(&self, model: &Path) -> anyhow::Result<PathBuf> {
        self.folder(model, |hub, name, progress| hub.tokenizer(name, progress))
    }

    fn folder(
        &self,
        model: &Path,
        get: impl FnOnce(&Hub, &ModelName, &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf, HubError>,
    ) -> anyhow::Result<PathBuf> {
        let Some(name) = ModelName::from_path(model) else { return Ok(model.to_owned()) };
        let hub = Hub::from_env()?;
        let hub = if self.offline { hub.offline() } else { hub };
        let bar = bar("{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}")?;
        let folder = get(&hub, &name, &mut |progress| {
            bar.set_length(progress.total_bytes);
            bar.set_position(progress.bytes);
            bar.set_message(progress.file.to_owned());
        });
        bar.finish_and_clear();
        folder.with_context(|| format!("{name} is not a local folder, and the Hub failed"))
    }
}

impl ModelArgs {
    /// Opens the folder of the model with its adapter. Downloads the model if it is a name on the Hub.
    pub(crate) fn open(&self) -> anyhow::Result<ModelFolder> {
        let folder = self.load.folder(&self.hub.model(&self.model)?)?;
        Ok(match &self.adapter {
            Some(adapter) => folder.with_adapter(adapter)?,
            None => folder,
        })
    }

    pub(crate) fn device(&self) -> anyhow::Result<Device> {
        self.load.open()
    }

    pub(crate) fn options(&self) -> EngineOptions {
        self.load.options()
    }

    /// Loads the model with a progress bar if the workload fits the device. `prompt` is as in [`EngineOptions`].
    pub(crate) fn load(
        &self,
        folder: ModelFolder,
        preset: Option<Preset>,
        workload: Workload,
        prompt: Option<usize>,
    ) -> anyhow::Result<Engine> {
        let device = self.device()?;
        let options = match preset {
            Some(preset) => self.of_preset(preset, device.profile(), &folder, &workload)?,
            None => self.options(),
        };
        loaded(&device, folder, &EngineOptions { workload: Some(workload), prompt, ..options })
    }

    /// Returns options with the preset's preferred precision among those in which the workload fits.
    fn of_preset(
        &self,
        preset: Preset,
        profile: &ArchProfile,
        folder: &ModelFolder,
        workload: &Workload,
    ) -> anyhow::Result<EngineOptions> {
        if preset == Preset::Training {
            bail!(
                "preset {preset} is only for `train` and `plan`\nhint: use --preset code-generation, inference or latency"
            );
        }
        let chosen =
            preset.precision(&self.options(), |o| folder.plan(profile, o, workload.clone()))?;
        command::note!("preset {preset}: {}", chosen.plan.precision());
        Ok(chosen.options)
    }
}

/// Refuses an output file that is one of the model's files.
pub(crate) fn spared(folder: &ModelFolder, target: &OutFile) -> anyhow::Result<()> {
    all_spared(folder.files(), target)
}

/// Refuses an output file that is one of the input files.
pub(crate) fn all_spared(
    files: impl IntoIterator<Item = PathBuf>,
    target: &OutFile,
) -> anyhow::Result<()> {
    let is_target = |file: &PathBuf| OutFile::new(file).is_ok_and(|file| file.is_same(target));
    match files.into_iter().find(is_target) {
        Some(file) => {
            bail!(
                "input and output are the same file: {}\nhint: choose another output file",
                file.display()
            )
        }
        None => Ok(()),
    }
}

/// Loads a folder with a progress bar.
pub(crate) fn loaded(
    device: &Device,
    folder: ModelFolder,
    options: &EngineOptions,
) -> anyhow::Result<Engine> {
    with_progress(|report| Engine::from_folder(device, folder, options, report))
}

/// Shows the progress of `load`, and what the model runs on.
fn with_progress(
    load: impl FnOnce(&mut dyn FnMut(LoadProgress)) -> Result<Engine, LoadError>,
) -> anyhow::Result<Engine> {
    let bar = bar("loading {wide_bar} {percent}%, {eta} left{msg}")?;
    let engine = load(&mut |progress| {
        bar.set_length(progress.parts as u64);
        bar.set_position(progress.done as u64);
        if progress.kernels > 0 {
            bar.set_message(format!(", compiling {}", command::count(progress.kernels, "kernel")));
        }
    });
    bar.finish_and_clear();
    let engine = engine?;
    on(&engine);
    Ok(engine)
}

/// Says on a terminal which device and precision a model runs in.
fn on(engine: &Engine) {
    if io::stderr().is_terminal() {
        let (device, (computes, weights)) = (engine.device(), engine.precision());
        let weights = weights.map_or_else(String::new, |weights| format!(", weights in {weights}"));
        let name = &device.profile().name;
        command::note!("on {name} ({}), {computes}{weights}", device.backend());
    }
}

impl Subject<'_> {
    /// Plans the memory of the workload without loading the model.
    pub(crate) fn plan(
        &self,
        profile: &ArchProfile,
        options: &EngineOptions,
        workload: Workload,
    ) -> Result<Plan, LoadError> {
        match self {
            Self::Folder(folder) => Plan::of_folder(profile, folder, options, workload),
            Self::Shape(shape) => Plan::of_shape(profile, shape, options, workload),
        }
    }
}

/// Memory of a model that a CPU runs slowly, in bytes.
const MUCH: u64 = 4 << 30;

impl SubjectArgs {
    /// Returns the shape or the folder. Downloads the model if it is a name on the Hub.
    pub(crate) fn subject(&self) -> anyhow::Result<Subject<'_>> {
        match (&self.model, &self.shape) {
            (Some(model), _) => Ok(Subject::Folder(self.hub.model(model)?)),
            (None, Some(shape)) => Ok(Subject::Shape(shape)),
            (None, None) => {
                bail!("no model is named\nhint: add --model, or for new weights --shape")
            }
        }
    }

    /// Returns true if a model or a shape is named; commands that need none are `train --full --resume`.
    pub(crate) const fn is_named(&self) -> bool {
        self.model.is_some() || self.shape.is_some()
    }

    pub(crate) fn shape(&self) -> Option<&str> {
        self.shape.as_deref()
    }

    /// Returns the model or shape as written on the command line.
    pub(crate) fn name(&self) -> String {
        match (&self.model, &self.shape) {
            (Some(model), _) => model.display().to_string(),
            (None, shape) => shape.clone().unwrap_or_default(),
        }
    }

    /// Refuses tests that exceed the model's context or the device's memory, before anything is loaded.
    pub(crate) fn check(&self, device: &Device, tests: &[SpeedTest]) -> anyhow::Result<()> {
        let (subject, options) = (self.subject()?, self.load.options());
        // At the same batch, the longest sequences take the most memory.
        let (mut longest, mut peak) = (BTreeMap::new(), 0);
        for SpeedTest { prompt, generated, depth, batch } in tests {
            let positions = depth.saturating_add(*prompt).saturating_add(*generated);
            let own = longest.entry(*batch).or_insert(positions);
            *own = positions.max(*own);
        }
        for (batch, positions) in longest {
            let workload = Workload::new(batch, positions);
            let plan = subject.plan(device.profile(), &options, workload)?;
            peak = peak.max(plan.fitting()?.peak_bytes());
        }
        if device.backend() == Backend::Cpu && peak > MUCH {
            command::note!(
                "note: needs {:.0} GiB; on a CPU, loading takes minutes and each token takes seconds",
                peak as f64 / f64::from(1 << 30)
            );
        }
        Ok(())
    }

    /// Loads the model with a progress bar, or generates random weights. Refuses `target`, an output file, if it is one
    /// of the model's files.
    pub(crate) fn engine(
        &self,
        device: &Device,
        target: Option<&OutFile>,
    ) -> anyhow::Result<Engine> {
        Ok(match self.subject()? {
            Subject::Folder(folder) => {
                let folder = self.load.folder(&folder)?;
                target.map_or(Ok(()), |target| spared(&folder, target))?;
                loaded(device, folder, &self.load.options())?
            }
            Subject::Shape(shape) => {
                with_progress(|report| Engine::random(device, shape, &self.load.options(), report))?
            }
        })
    }
}

impl LoadArgs {
    pub(crate) fn open(&self) -> anyhow::Result<Device> {
        self.device.open()
    }

    /// Opens a model's folder with the context length of `--max-context`.
    pub(crate) fn folder(&self, folder: &Path) -> anyhow::Result<ModelFolder> {
        let folder = ModelFolder::open(folder)?;
        let Some(positions) = self.max_context else { return Ok(folder) };
        let made_for = folder.config().context();
        let folder = folder.with_max_context(positions.get())?;
        if let Some(made_for) = made_for.filter(|max| positions.get() > *max) {
            command::note!(
                "warning: the model has a context of {made_for} tokens; output beyond it may be poor"
            );
        }
        Ok(folder)
    }

    pub(crate) fn options(&self) -> EngineOptions {
        let BudgetArgs { memory_limit, memory_reserve, memory_fraction } = self.budget;
        EngineOptions {
            dtype: self.dtype,
            quant: self.quant,
            kv: self.kv_cache,
            int8_activations: self.int8_activations,
            policy: Some(self.policy),
            budget: MemoryBudget {
                limit_bytes: memory_limit,
                reserve_bytes: memory_reserve,
                fraction: memory_fraction,
            },
            max_context: self.max_context.map(NonZeroUsize::get),
            workload: None,
            prompt: None,
        }
    }

    /// Returns the published card of `--profile`, which replaces a device. Refuses a card of another backend than
    /// `--backend`.
    pub(crate) fn described(&self) -> anyhow::Result<Option<ArchProfile>> {
        let Some(name) = &self.device.profile else { return Ok(None) };
        let profile = ArchProfile::card(name)?;
        match self.device.backend {
            Some(backend) if backend != profile.backend => {
                let (profile, of) = (name.clone(), profile.backend);
                Err(OpenError::ForeignProfile { profile, of, backend }.into())
            }
            _ => Ok(Some(profile)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_compare_are_known_here() {
        assert!(report::DTYPES.into_iter().all(|word| dtype(word).is_ok()));
        assert_eq!(KvFormat::ALL.map(KvFormat::name), report::KV_CACHES);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("14GiB"), Ok(14 << 30));
        assert_eq!((size("2TiB"), size("1.5T")), (Ok(2 << 40), Ok(1_500_000_000_000)));
        assert_eq!(size("1.5 gib"), Ok(3 << 29));
        assert_eq!(size("2GB"), Ok(2_000_000_000));
        assert_eq!(size("512MiB"), Ok(512 << 20));
        assert_eq!(size("4096"), Ok(4096));
        for bad in ["", "x", "-1", "1TiBs", "GiB", "1e99", "1.2.3", "99999999999GiB", "nan"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
