//! Folders that contradict their config.json: each is an error that lists all problems.

use std::fs;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use checkpoint::{Checkpoint, DType, Int8, Plan, Tensor, Weight, Writer};
use models::{Decoder, DecoderConfig, Error, LoadOptions, Part, Slot, Weights};
use ops::{Ctx, WeightFormat};

use crate::{fixture, open};

/// A tensor with its name.
type Named = (String, Tensor<'static>);

/// Returns the tensors of a fixture, for a test to change.
fn tensors(name: &str) -> Vec<Named> {
    let file = Checkpoint::open(fixture(name)).expect("a fixture");
    let named = |name: &str| {
        let Tensor { dtype, shape, bytes } = file.tensor(name).expect("listed");
        (name.to_owned(), Tensor::new(dtype, &shape, bytes.into_owned()))
    };
    file.names().map(named).collect()
}

/// Opens a fixture with other tensors.
fn with(name: &str, tensors: &[Named]) -> Result<Weights, Error> {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let path = folder.path().join("model.safetensors");
    let plan = tensors.iter().map(|(name, tensor)| Plan::new(name, tensor.dtype, &tensor.shape));
    let mut writer = Writer::create(&path, plan)?;
    writer.write_all(tensors)?;
    writer.finish()?;
    Weights::new(DecoderConfig::open(fixture(name))?, Checkpoint::open(folder.path())?)
}

fn position(tensors: &[Named], name: &str) -> usize {
    tensors.iter().position(|(known, _)| known == name).expect("a tensor of the fixture")
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let mut tensors = tensors("llama");
    let norm = position(&tensors, "model.norm.weight");
    tensors.remove(norm);
    let up = position(&tensors, "model.layers.1.mlp.up_proj.weight");
    tensors.remove(up);
    let query = position(&tensors, "model.layers.0.self_attn.q_proj.weight");
    tensors[query].1.shape = vec![64, 16];
    let head = position(&tensors, "lm_head.weight");
    tensors[head].1 = Tensor::new(DType::I64, &[1], vec![0; 8]);
    tensors.push((
        "model.layers.2.mlp.up_proj.weight".into(),
        Tensor::new(DType::F32, &[1], vec![0; 4]),
    ));
    tensors.push(("adapter".into(), Tensor::new(DType::F32, &[1], vec![0; 4])));
    let error = with("llama", &tensors).expect_err("spoiled");
    assert_eq!(
        error.to_string(),
        "tensors are damaged or do not match config.json: 2 missing, 2 unused, 2 wrong\n\
         missing: model.layers.1.mlp.up_proj.weight\n\
         missing: model.norm.weight\n\
         unused: adapter\n\
         unused: model.layers.2.mlp.up_proj.weight\n\
         wrong: tensor model.layers.0.self_attn.q_proj.weight: has shape [64, 16], expected [32, 32]\n\
         wrong: tensor lm_head.weight: is I64, expected F16 or BF16 or F32"
    );
}

/// A file that was not fetched, and a llama.cpp file instead of a folder.
#[test]
fn pointers_of_git_lfs_and_gguf_files_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9480648\n";
    for file in ["config.json", "model.safetensors"] {
        let folder = tempfile::tempdir().expect("a folder for the test");
        for own in ["config.json", "model.safetensors"] {
            fs::copy(fixture("llama").join(own), folder.path().join(own)).expect("copied");
        }
        fs::write(folder.path().join(file), pointer).expect("written");
        let error = Weights::open(folder.path()).expect_err("a pointer");
        assert_eq!(error.hint(), "\nhint: fetch the file with `git lfs pull` in its folder");
        let refused = error.to_string();
        assert!(refused.contains(file), "{refused}");
        assert!(refused.contains("it is a git-lfs pointer instead of the file"), "{refused}");
    }
    let folder = tempfile::tempdir().expect("a folder for the test");
    let path = folder.path().join("model-q4_0.gguf");
    fs::write(&path, "GGUF").expect("written");
    let refused = Weights::open(&path).expect_err("a file").to_string();
    assert!(refused.contains("it is a GGUF file"), "{refused}");
}

#[test]
fn what_cannot_be_quantised_is_named() {
    let (mut tensors, name) = (tensors("llama"), "model.layers.1.mlp.up_proj.weight");
    let up = position(&tensors, name);
    tensors[up].1.bytes.to_mut().fill(0xff); // NaN.
    let weights = with("llama", &tensors).expect("all are there");
    for quant in [WeightFormat::Nf4, WeightFormat::Int8].map(WeightFormat::scheme) {
        let options =
            LoadOptions { dtype: Some(FloatDType::F32), quant: Some(quant), ..Default::default() };
        let loaded = Decoder::load(&weights, &Device::cpu(), Ctx::default(), &options, |_| {});
        let Err(error) = loaded else { panic!("NaN in {quant:?} went unseen") };
        assert_eq!(
            error.to_string(),
            format!(
                "tensor {name}: expected a finite weight, got infinities or NaN\n\
                 hint: keep the weight dense, or repair its values"
            )
        );
    }
}

#[test]
fn a_fused_tensor_is_missing_once() {
    let mut tensors = tensors("phi3");
    let qkv = position(&tensors, "model.layers.1.self_attn.qkv_proj.weight");
    tensors.remove(qkv);
    let Err(Error::Tensors { missing, unused, wrong }) = with("phi3", &tensors) else {
        panic!("a missing tensor went unseen");
    };
    assert_eq!(missing, ["model.layers.1.self_attn.qkv_proj.weight"]);
    assert!(unused.is_empty() && wrong.is_empty());
}

/// Masks and frequencies of older files are no parameters.
#[test]
fn what_old_files_hold_beside_is_known() {
    let stray = |name: &str| (name.to_owned(), Tensor::new(DType::F32, &[4], vec![0; 16]));
    for (name, ignored, unused) in [
        (
            "llama",
            "model.layers.1.self_attn.rotary_emb.inv_freq",
            "model.layers.7.self_attn.rotary_emb.inv_freq",
        ),
        ("gpt2", "transformer.h.1.attn.masked_bias", "h.1.attn.masked_bias"),
    ] {
        let mut tensors = tensors(name);
        tensors.push(stray(ignored));
        with(name, &tensors).unwrap_or_else(|error| panic!("{name}: {error}"));
        tensors.push(stray(unused));
        let Err(Error::Tensors { unused: found, .. }) = with(name, &tensors) else {
            panic!("{name}: {unused} went unseen");
        };
        assert_eq!(found, [unused]);
    }
}

/// A head that equals the embedding is tied; one with other values is not, as in transformers 5.
#[test]
fn a_head_is_tied_where_it_is_a_copy() {
    for name in ["llama3_tied", "qwen3"] {
        let mut tensors = tensors(name);
        let embedding = tensors[position(&tensors, "model.embed_tokens.weight")].1.clone();
        tensors.push(("lm_head.weight".into(), embedding.clone()));
        let tied = with(name, &tensors).expect("a copy");
        assert!(tied.config().tie_embeddings, "{name}");
        let mut bytes = embedding.bytes.into_owned();
        bytes[0] ^= 1;
        let head = Tensor::new(embedding.dtype, &embedding.shape, bytes);
        tensors.last_mut().expect("the head").1 = head.clone();
        let own = with(name, &tensors).expect("a head of its own");
        assert!(!own.config().tie_embeddings, "{name}");
        let stored = own.weight(Slot::Head).expect("there").dense().expect("dense");
        assert_eq!(stored, head, "{name}");
        tensors.push(("lm_head.bias".into(), Tensor::new(DType::F32, &[4], vec![0; 16])));
        let Err(Error::Tensors { unused, .. }) = with(name, &tensors) else {
            panic!("{name}: a bias went unseen");
        };
        assert_eq!(unused, ["lm_head.bias"]);
    }
}

/// Without its quant state, codes have no meaning and absmax belongs to no weight.
#[test]
fn a_broken_quantisation_is_wrong_not_unused() {
    let mut tensors = tensors("llama_nf4");
    let name = "model.layers.0.mlp.up_proj.weight";
    let map = position(&tensors, &format!("{name}.quant_map"));
    tensors.remove(map);
    let Err(Error::Tensors { missing, unused, wrong }) = with("llama_nf4", &tensors) else {
        panic!("a missing code book went unseen");
    };
    assert!(missing.is_empty() && unused.is_empty(), "{unused:?}");
    let [why] = &wrong[..] else { panic!("{wrong:?}") };
    assert_eq!(why.to_string(), format!("tensor {name}.quant_map: is missing"));
}

#[test]
fn int8_is_taken_where_tensors_say_so() -> Result<(), Error> {
    let mut tensors = tensors("llama");
    let name = "model.layers.0.mlp.up_proj.weight";
    let up = position(&tensors, name);
    let (_, Tensor { shape, .. }) = tensors.remove(up);
    let [n, k] = shape[..] else { panic!("a matrix") };
    let codes = (0..n * k).map(|i| i as u8).collect::<Vec<_>>();
    let int8 = Int8 { shape: [n, k], codes: codes.into(), scb: vec![0.5; n].into() };
    for (name, Tensor { dtype, shape, bytes }) in int8.tensors(name)? {
        tensors.push((name, Tensor::new(dtype, &shape, bytes.into_owned())));
    }
    let weights = with("llama", &tensors)?;
    let stored = weights.weight(Slot::Layer(0, Part::Up))?;
    assert!(matches!(&stored.weight, Weight::Int8(have) if *have == int8));
    // A norm is never quantised.
    let at = position(&tensors, "model.norm.weight");
    tensors[at].1 = Tensor::new(DType::I8, &[32], vec![0; 32]);
    let error = with("llama", &tensors).expect_err("a norm in bytes");
    assert!(error.to_string().contains("wrong: tensor model.norm.weight: is I8"), "{error}");
    Ok(())
}

#[test]
fn shards_that_are_cut_or_gone() {
    let copy = |to: &Path| {
        for entry in fs::read_dir(fixture("llama_sharded")).expect("a fixture") {
            let entry = entry.expect("readable");
            fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
        }
    };
    let folder = tempfile::tempdir().expect("a folder for the test");
    copy(folder.path());
    Weights::open(folder.path()).expect("a copy is as good");
    let index = folder.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).expect("an index");
    let one = text.replace("model-00002-of-00004", "model-00001-of-00004");
    fs::write(&index, one).expect("written");
    let error = Weights::open(folder.path()).expect_err("all in one shard");
    assert!(
        error.to_string().lines().count() > 2 && error.hint().starts_with("\nhint: "),
        "{error}"
    );
    fs::write(&index, text).expect("written");
    let shard = folder.path().join("model-00002-of-00004.safetensors");
    let bytes = fs::read(&shard).expect("a shard");
    fs::write(&shard, &bytes[..bytes.len() - 10]).expect("cut");
    let error = Weights::open(folder.path()).expect_err("cut").to_string();
    assert!(
        error.contains("model-00002-of-00004.safetensors is not a safetensors file"),
        "{error}"
    );
    fs::remove_file(&shard).expect("there");
    let error = Weights::open(folder.path()).expect_err("gone").to_string();
    assert!(error.contains("model-00002-of-00004.safetensors, which does not exist"), "{error}");
    fs::remove_file(folder.path().join("config.json")).expect("there");
    let error = Weights::open(folder.path()).expect_err("no config").to_string();
    assert!(error.contains("config.json: "), "{error}");
}

/// Missing tensors are listed with their full names, whatever the prefix of the file.
#[test]
fn another_models_tensors() {
    let Err(Error::Tensors { missing, unused, wrong }) = with("gpt2", &tensors("llama")) else {
        panic!("a Llama passed as GPT-2");
    };
    assert!(missing.iter().all(|name| name.starts_with("transformer.")), "{missing:?}");
    assert_eq!(unused.len(), open("llama").config().params().len() - 1); // The tied head is not unused.
    assert!(wrong.is_empty());
}
