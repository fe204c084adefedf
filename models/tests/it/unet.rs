//! U-Nets against diffusers, and errors of invalid ones.

use std::fs;
use std::path::PathBuf;

use burn::tensor::{Device, FloatDType};
use checkpoint::{Checkpoint, DType, Plan, Tensor, Writer};
use models::Error;
use models::unet::{
    Condition, Frames, Schedule, Unet, UnetConfig, UnetOptions, UnetPlan, UnetShape, UnetWeights,
    shapes,
};
use ops::Ctx;
use suite::decoder::floats;

/// Every folder that `fixtures/unet.py` writes.
const FOLDERS: [&str; 4] = ["plain", "residual", "text", "text_time"];

fn folder(name: &str) -> PathBuf {
    crate::fixture("unet").join(name)
}

/// Inputs of a frame, and results of diffusers.
struct Golden(Checkpoint);

impl Golden {
    fn open(name: &str) -> Self {
        Self(Checkpoint::open(folder(name).join("golden.safetensors")).expect("a fixture"))
    }

    fn values(&self, name: &str) -> Option<Vec<f32>> {
        self.0.tensor(name).ok().map(|tensor| floats(&tensor))
    }

    fn shape(&self) -> UnetShape {
        let shape = |name: &str| self.0.tensor(name).map(|tensor| tensor.shape);
        let sample = shape("sample").expect("unet.py writes it");
        let tokens = shape("text").map_or(0, |text| text[1]);
        UnetShape { batch: sample[0], size: [sample[2], sample[3]], tokens }
    }

    /// Computes the frame with `unet`.
    fn frame(&self, unet: &Unet) -> Vec<f32> {
        let [text, classes, pooled, sizes, timesteps, sample] =
            ["text", "classes", "pooled", "sizes", "timestep", "sample"]
                .map(|name| self.values(name));
        let condition = Condition {
            timesteps: timesteps.as_deref().expect("unet.py writes it"),
            text: text.as_deref(),
            classes: classes.as_deref(),
            pooled_text: pooled.as_deref(),
            sizes: sizes.as_deref(),
        };
        let mut frames = Frames::new(unet, self.shape()).expect("a valid shape");
        let sample = sample.expect("unet.py writes it");
        let first = frames.frame(&sample, &condition).expect("the CPU runs it");
        let second = frames.frame(&sample, &condition).expect("the CPU runs it");
        assert_eq!(first, second);
        first
    }
}

fn load(name: &str, dtype: FloatDType) -> Unet {
    let weights = UnetWeights::open(folder(name)).unwrap_or_else(|why| panic!("{name}: {why}"));
    let options = UnetOptions { dtype: Some(dtype), ..UnetOptions::default() };
    Unet::load(&weights, &Device::cpu(), Ctx::default(), options).expect("finite weights")
}

/// Returns the largest difference, relative to the largest value.
fn distance(have: &[f32], want: &[f32]) -> f64 {
    assert_eq!(have.len(), want.len());
    let largest = want.iter().fold(0f32, |top, value| top.max(value.abs()));
    let gaps = have.iter().zip(want).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    crate::largest(gaps) / f64::from(largest)
}

/// Returns the root mean square of the differences, relative to the largest value.
fn deviation(have: &[f32], want: &[f32]) -> f64 {
    assert_eq!(have.len(), want.len());
    let largest = want.iter().fold(0f32, |top, value| top.max(value.abs()));
    let gaps = have.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b));
    let sum: f64 = gaps.map(|gap| gap * gap).sum();
    (sum / have.len() as f64).sqrt() / f64::from(largest)
}

#[test]
fn frames_are_those_of_diffusers() {
    for name in FOLDERS {
        let golden = Golden::open(name);
        let exact = golden.values("f32").expect("unet.py writes it");
        let own = distance(&golden.frame(&load(name, FloatDType::F32)), &exact);
        println!("{name} f32: {own:.1e} of the largest value");
        assert!(own <= 3e-6, "{name}: {own:e}");
    }
}

#[test]
fn halves_are_as_exact_as_those_of_torch() {
    // Each dtype compiles all kernels.
    for (name, dtype, file) in
        [("text", FloatDType::F16, "f16"), ("residual", FloatDType::BF16, "bf16")]
    {
        let golden = Golden::open(name);
        let exact = golden.values("f32").expect("unet.py writes it");
        let torch = deviation(&golden.values(file).expect("unet.py writes it"), &exact);
        let own = deviation(&golden.frame(&load(name, dtype)), &exact);
        println!("{name} {file}: {own:.2e} of the largest value, torch {torch:.2e}");
        assert!(own <= 1.2 * torch, "{name} {file}: {own:e}, torch {torch:e}");
    }
}

/// Parameters and operations of a frame, as diffusers and torch's counter give them.
#[test]
fn shapes_have_the_sizes_of_diffusers() {
    let sizes = |name: &str| {
        let config = shapes::named(name).expect("listed");
        let tokens = if config.cross.is_some() { 77 } else { 0 };
        let plan = UnetPlan::new(&config, 1, [64, 64], tokens).expect("64 divides");
        (plan.parameters(), plan.flops() / 1_000_000_000)
    };
    assert_eq!(sizes("unet-880m"), (876_701_955, 353));
    assert_eq!(sizes("unet-38m"), (38_112_483, 18));
    assert_eq!(sizes("unet-1b").0, 1_028_873_667);
    assert_eq!(sizes("sd15"), (859_520_964, 803));
    assert_eq!(sizes("sdxl").0, 2_567_463_684);
    assert!(shapes::names().all(|name| shapes::named(name).is_some()));
}

/// Returns the error of a `config.json` with another field.
fn refused(name: &str, field: &str, value: &str) -> String {
    let text = fs::read_to_string(folder(name).join("config.json")).expect("a fixture");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config[field] = serde_json::from_str(value).expect("JSON");
    UnetConfig::from_json(&config.to_string()).expect_err("refused").to_string()
}

#[test]
fn unknown_parts_of_a_config_are_named() {
    for (name, field, value, text) in [
        (
            "plain",
            "attention_head_dim",
            "5",
            "config.json: `block_out_channels` is 8, expected a multiple of `attention_head_dim`, 5",
        ),
        (
            "plain",
            "down_block_types",
            r#"["DownBlock2D", "SkipDownBlock2D"]"#,
            r#"config.json: `down_block_types` is ["DownBlock2D","SkipDownBlock2D"], which is not supported; expected DownBlock2D, AttnDownBlock2D"#,
        ),
        (
            "text",
            "mid_block_type",
            r#""UNetMidBlock2DSimpleCrossAttn""#,
            r#"config.json: `mid_block_type` is "UNetMidBlock2DSimpleCrossAttn", which is not supported; expected "UNetMidBlock2DCrossAttn", null"#,
        ),
        (
            "plain",
            "act_fn",
            r#""mish""#,
            r#"config.json: `act_fn` is "mish", which is not supported; expected "silu", "swish", "gelu", "relu""#,
        ),
        (
            "plain",
            "time_embedding_type",
            r#""fourier""#,
            r#"config.json: `time_embedding_type` is "fourier", which is not supported; expected "positional""#,
        ),
        (
            "plain",
            "layers_per_block",
            "100000",
            "config.json: `layers_per_block` is 100000, expected an integer from 1 to 10000",
        ),
        (
            "text",
            "transformer_layers_per_block",
            "[6000, 9000]",
            "config.json: `layers_per_block` is 1, expected at most 10000 layers and transformer blocks in all",
        ),
        (
            "plain",
            "freq_shift",
            "4",
            "config.json: `freq_shift` is 4, expected a number below 4, half the channels of a timestep",
        ),
        (
            "plain",
            "attn_norm_num_groups",
            "3",
            "config.json: `block_out_channels` is 16, expected a multiple of `attn_norm_num_groups`, 3",
        ),
        (
            "plain",
            "norm_num_groups",
            "3",
            "config.json: `block_out_channels` is 8, expected a multiple of `norm_num_groups`, 3",
        ),
        (
            "text",
            "attention_head_dim",
            "[2, 4, 8]",
            "config.json: `attention_head_dim` is [2,4,8], expected a number, or 2 numbers",
        ),
        (
            "plain",
            "_class_name",
            r#""AutoencoderKL""#,
            r#"config.json: `_class_name` is "AutoencoderKL", which is not supported; expected UNet2DModel, UNet2DConditionModel"#,
        ),
    ] {
        assert_eq!(refused(name, field, value), text);
    }
}

#[test]
fn samples_and_conditions_of_other_sizes_are_refused() {
    let unet = load("text", FloatDType::F32);
    let shape = UnetShape { batch: 1, size: [8, 6], tokens: 5 };
    let error = |shape| Frames::new(&unet, shape).expect_err("refused").to_string();
    let text = error(UnetShape { size: [8, 7], ..shape });
    assert!(text.starts_with("expected height and width that are multiples of 2, got [8, 7]"));
    let text = error(UnetShape { batch: 0, ..shape });
    assert!(text.starts_with("expected a frame of 1 to 4294967295 samples, got 0"), "{text}");
    let text = error(UnetShape { batch: 1 << 30, ..shape });
    assert!(text.contains(" pixels, got 51539607552\nhint: "), "{text}");
    let text = error(UnetShape { tokens: 0, ..shape });
    assert!(text.starts_with("the model reads a text, but none is given\nhint: "), "{text}");
    let mut frames = Frames::new(&unet, shape).expect("valid");
    let (sample, text) = (vec![0.0; 4 * 48], vec![0.0; 5 * 24]);
    let valid = Condition { timesteps: &[1.0], text: Some(&text), ..Condition::default() };
    frames.refresh(&sample, &valid).expect("valid");
    let mut refused = |sample: &[f32], condition: &Condition<'_>| {
        frames.refresh(sample, condition).expect_err("refused").to_string()
    };
    let got = refused(&sample[1..], &valid);
    assert!(got.starts_with("expected 192 sample values, got 191"), "{got}");
    let got = refused(&sample, &Condition { text: None, ..valid });
    assert!(got.starts_with("the model reads text features, but none is given"), "{got}");
    let got = refused(&sample, &Condition { classes: Some(&[0.0]), ..valid });
    assert!(got.starts_with("the model does not read classes\nhint: "), "{got}");
    let got = refused(&sample, &Condition { timesteps: &[1.0, 2.0], ..valid });
    assert!(got.starts_with("expected 1 timesteps, got 2"), "{got}");
}

/// Opens the fixture `plain` with other tensors, and loads it.
fn with(change: impl Fn(&mut Vec<(String, Tensor<'static>)>)) -> Result<Unet, Error> {
    let file = folder("plain").join("diffusion_pytorch_model.safetensors");
    let file = Checkpoint::open(file).expect("a fixture");
    let named = |name: &str| {
        let Tensor { dtype, shape, bytes } = file.tensor(name).expect("listed");
        (name.to_owned(), Tensor::new(dtype, &shape, bytes.into_owned()))
    };
    let mut tensors: Vec<_> = file.names().map(named).collect();
    change(&mut tensors);
    let target = tempfile::tempdir().expect("a folder for the test");
    let config = target.path().join("config.json");
    fs::copy(folder("plain").join("config.json"), config).expect("copied");
    let path = target.path().join("diffusion_pytorch_model.safetensors");
    let plan = tensors.iter().map(|(name, tensor)| Plan::new(name, tensor.dtype, &tensor.shape));
    let mut writer = Writer::create(&path, plan)?;
    writer.write_all(&tensors)?;
    writer.finish()?;
    let weights = UnetWeights::open(target.path())?;
    Unet::load(&weights, &Device::cpu(), Ctx::default(), UnetOptions::default())
}

#[test]
fn tensors_that_do_not_match_are_all_named() {
    let error = with(|tensors| {
        tensors.retain(|(name, _)| name != "conv_out.bias");
        let own = tensors.iter_mut().find(|(name, _)| name == "conv_in.weight");
        own.expect("a tensor of the fixture").1.shape = vec![8, 3, 9];
        tensors.push(("ema".into(), Tensor::new(DType::F32, &[1], vec![0; 4])));
    });
    assert_eq!(
        error.expect_err("spoiled").to_string(),
        "tensors are damaged or do not match config.json: 1 missing, 1 unused, 1 wrong\n\
         missing: conv_out.bias\n\
         unused: ema\n\
         wrong: tensor conv_in.weight: has shape [8, 3, 9], expected [8, 3, 3, 3]"
    );
    let error = with(|tensors| {
        let own = tensors.iter_mut().find(|(name, _)| name == "conv_in.weight");
        own.expect("a tensor of the fixture").1.bytes.to_mut()[..4]
            .copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert_eq!(
        error.expect_err("spoiled").to_string(),
        "tensor conv_in.weight has values that are infinite or NaN in f32\nhint: download the weights again"
    );
}

/// Samplings of diffusers, with `0.3 · x + timestep / 5000` in place of a model.
#[test]
fn schedules_are_those_of_diffusers() {
    let text = fs::read_to_string(folder("schedules.json")).expect("a fixture");
    let all: Vec<serde_json::Value> = serde_json::from_str(&text).expect("JSON");
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        let list = value.as_array().expect("a list").iter();
        list.map(|number| number.as_f64().expect("a number")).collect()
    };
    assert!(!all.is_empty());
    for golden in &all {
        let what = golden["config"].to_string();
        let schedule = Schedule::from_json(&what).expect("supported");
        let timesteps = numbers(&golden["timesteps"]);
        let steps = schedule.steps(timesteps.len()).expect("as many as the training had");
        let gap = steps.timesteps().iter().zip(&timesteps).map(|(a, b)| (a - b).abs());
        assert!(crate::largest(gap) < 1e-4, "{what}: {:?} {timesteps:?}", steps.timesteps());
        let noise = numbers(&golden["noise"]);
        let deviation = steps.initial_deviation();
        let mut sample: Vec<f32> = noise.iter().map(|x| (x * deviation) as f32).collect();
        let wanted = golden["samples"].as_array().expect("a list");
        for (at, want) in wanted.iter().enumerate() {
            let (factor, more) = (steps.input_factor(at), steps.timesteps()[at] / 5000.0);
            let result = |x: &f32| (0.3 * factor * f64::from(*x) + more) as f32;
            let result: Vec<f32> = sample.iter().map(result).collect();
            steps.step(at, &result, &mut sample);
            let want = numbers(want);
            let largest = crate::largest(want.iter().map(|x| x.abs()));
            let gaps = sample.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs());
            let gap = crate::largest(gaps);
            assert!(gap <= 1e-5 * largest.max(1.0), "{what}, step {at}: {sample:?} {want:?}");
        }
    }
    let ddim = Schedule::from_json(r#"{"_class_name": "DDIMScheduler"}"#).expect("supported");
    assert!(ddim.steps(0).is_err() && ddim.steps(1001).is_err());
    let dark =
        r#"{"_class_name": "DDIMScheduler", "num_train_timesteps": 100000, "beta_end": 0.99}"#;
    let error = Schedule::from_json(dark).expect_err("no signal is left").to_string();
    assert!(error.contains("expected betas that leave a signal"), "{error}");
    let error = Schedule::from_json(r#"{"_class_name": "HeunDiscreteScheduler"}"#);
    let error = error.expect_err("unsupported").to_string();
    assert!(error.starts_with("scheduler_config.json: `_class_name` is \"HeunDiscreteScheduler\""));
}
