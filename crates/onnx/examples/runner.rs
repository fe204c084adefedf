//! Times a model and compares it with the host: `runner FILE [cpu|cuda|vulkan|cubecl] [f32|f16] [PASSES] [TIMES] [BATCH]`.

use std::error::Error;

use burn::tensor::{DType, Device, TensorData};
use onnx::passes::Passes;
use onnx::{Model, Options};
use ops::Ctx;

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let text = |at: usize| args.get(at).map_or("", String::as_str);
    let (device, ctx) = match text(1) {
        "cuda" => (Device::cuda(0), Ctx::default().restricted_to("rtx4090")),
        "vulkan" => (Device::vulkan(burn::tensor::DeviceKind::default()), Ctx::default()),
        "cubecl" => (Device::cpu(), Ctx::default()),
        _ => (Device::flex(), Ctx::default()),
    };
    let dtype = if text(2) == "f16" { DType::F16 } else { DType::F32 };
    let passes = Passes::parse(text(3))?;
    let options = Options { passes, dtype: Some(dtype), ctx, ..Options::default() };
    let started = std::time::Instant::now();
    let model = Model::open(text(0), options, &device)?;
    let open = started.elapsed();
    let inputs: Vec<TensorData> = model.random(text(5).parse().unwrap_or(1))?;
    let times = text(4).parse().unwrap_or(20);
    let speed = model.measure(inputs.clone(), times)?;
    let mut each = speed.each.clone();
    each.extend(each.is_empty().then_some(speed.first));
    each.sort_unstable();
    println!(
        "{} {} {} [{}]: open {open:?} first {:?} frame {:?} alone {:?} captured {}",
        text(0),
        text(1),
        text(2),
        text(3),
        speed.first,
        speed.frame,
        each[each.len() / 2],
        speed.captured
    );
    if text(1).is_empty() || text(1) == "cpu" {
        return Ok(());
    }
    let have = model.run(inputs.clone())?;
    let host = Options { passes: Passes::none(), ..Options::default() };
    let want = Model::open(text(0), host, &Device::flex())?.run(inputs)?;
    for (have, want) in have.iter().zip(&want) {
        let (have, want): (Vec<f64>, Vec<f64>) = (have.iter().collect(), want.iter().collect());
        let largest = want.iter().fold(0f64, |all, own| all.max(own.abs()));
        let far = have.iter().zip(&want).fold(0f64, |all, (a, b)| {
            if (a - b).is_nan() { f64::INFINITY } else { all.max((a - b).abs()) }
        });
        let top =
            |own: &[f64]| own.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|own| own.0);
        println!(
            "  off by {:.2e} of the largest; same top {}",
            far / largest,
            top(&have) == top(&want)
        );
    }
    Ok(())
}
