//! Samplings of a U-Net.

use flashover::unet::{Condition, Method, Schedule, UnetModel, UnetOptions, UnetShape, sample};
use flashover::{Compute, LoadError};

use crate::{cpu, fixture};

#[test]
fn samples_depend_on_seed_and_method() {
    let options = UnetOptions { dtype: Some(Compute::F32), ..UnetOptions::default() };
    let model =
        UnetModel::load(&cpu(), fixture("unet").join("plain"), &options).expect("a fixture");
    let shape = UnetShape { batch: 1, size: [6, 8], tokens: 0 };
    let mut frames = model.frames(shape).expect("2 divides it");
    let ddim = Schedule::from_json(r#"{"_class_name": "DDIMScheduler"}"#).expect("supported");
    let mut sampled = |seed: u64, method: Method| {
        let steps = ddim.clone().with_method(method).steps(2).expect("fewer than 1000");
        let seen = |_| Ok::<_, LoadError>(());
        let result = sample(&mut frames, &steps, seed, &Condition::default(), seen);
        result.map_err(|why: LoadError| why.to_string()).expect("the CPU runs it")
    };
    let first = sampled(1, Method::Ddim);
    assert_eq!(first, sampled(1, Method::Ddim));
    assert!(first != sampled(2, Method::Ddim) && first != sampled(1, Method::Euler));
}
