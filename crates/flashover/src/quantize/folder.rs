//! The files next to the weights, and the output folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use checkpoint::{Staged, is_staging};
use serde_json::{Value, json};

use quant::WeightFormat;

use super::{QuantizeError, QuantizeOptions};

/// A valid output folder: absent or empty, and outside of the model's folder.
pub(super) struct Target(PathBuf);

impl Target {
    /// Checks that `output` is valid for the folder `model`.
    pub(super) fn new(model: &Path, output: &Path) -> Result<Self, QuantizeError> {
        let shown = output.display();
        let refused = |why: &str| Err(QuantizeError::Output(format!("{shown} {why}")));
        let output = match fs::metadata(output) {
            Ok(meta) if !meta.is_dir() => return refused("is a file"),
            Ok(_) => {
                // Completes a quantisation that a kill interrupted in the end, and ignores one that it interrupted before.
                checkpoint::recover(output)?;
                let first = fs::read_dir(output).map(|mut entries| {
                    entries.find(|entry| !entry.as_ref().is_ok_and(|own| is_staging(&own.path())))
                });
                match first {
                    Ok(None) => output.canonicalize().map_err(write_error(output))?,
                    Ok(Some(_)) => return refused("is not empty"),
                    Err(why) => return refused(&format!("cannot be read: {why}")),
                }
            }
            Err(_) if output.is_symlink() => return refused("is a link to nothing"),
            Err(_) => output.to_owned(),
        };
        let parent = match output.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let Ok(real) = parent.canonicalize() else {
            return refused("has no folder to lie in");
        };
        if model.canonicalize().is_ok_and(|model| real.starts_with(model)) {
            return refused("lies in the folder of the model");
        }
        Ok(Self(output))
    }

    /// Creates the folder, which is removed unless it is finished.
    pub(super) fn begin(self) -> Result<Staged, QuantizeError> {
        Ok(Staged::begin(self.0)?)
    }
}

/// Returns `config.json` with the `quantization_config` that transformers writes; all other text is unchanged.
pub(super) fn config(
    model: &Path,
    compute_dtype: &str,
    options: &QuantizeOptions,
) -> Result<String, QuantizeError> {
    const FILE: &str = "config.json";
    let path = model.join(FILE);
    let text = fs::read_to_string(&path).map_err(|why| models::Error::Read { path, why })?;
    let value: Value =
        serde_json::from_str(&text).map_err(|why| models::Error::Json { file: FILE, why })?;
    let field = "quantization_config";
    if value.get(field).is_some_and(|value| !value.is_null()) {
        return Err(QuantizeError::Quantized { what: format!("the model ({FILE}: `{field}`)") });
    }
    // For 8 bits, transformers also writes the fields of 4 bits.
    let four = options.format.bits() == 4;
    let quant_type = if four { options.format } else { WeightFormat::Fp4 };
    let quantization = json!({
        "_load_in_4bit": four,
        "_load_in_8bit": !four,
        "bnb_4bit_compute_dtype": if four { compute_dtype } else { "float32" },
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": four && options.nested,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        // Also the output projection, which bitsandbytes always skips.
        "llm_int8_skip_modules": null,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": four,
        "load_in_8bit": !four,
        "quant_method": "bitsandbytes",
    });
    Ok(with_field(&text, field, &quantization))
}

/// Adds a field at the end of a JSON object; it overrides an earlier one of the same name.
fn with_field(object: &str, field: &str, value: &Value) -> String {
    let open = object.trim_end().strip_suffix('}').unwrap_or(object).trim_end();
    let comma = if open.ends_with('{') { "" } else { "," };
    let value = format!("{value:#}").replace('\n', "\n  ");
    format!("{open}{comma}\n  \"{field}\": {value}\n}}\n")
}

/// Copies files of `model`, and creates their folders.
pub(super) fn copy(
    model: &Path,
    to: &Path,
    files: &[PathBuf],
    go_on: &dyn Fn() -> Result<(), QuantizeError>,
) -> Result<(), QuantizeError> {
    for file in files {
        go_on()?;
        let target = to.join(file);
        let folder = target.parent().unwrap_or(to);
        fs::create_dir_all(folder).map_err(write_error(folder))?;
        fs::copy(model.join(file), &target).map_err(write_error(&target))?;
    }
    Ok(())
}

/// Writes a file.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), QuantizeError> {
    fs::write(path, bytes).map_err(write_error(path))
}

fn write_error(path: &Path) -> impl Fn(io::Error) -> QuantizeError {
    let path = path.to_owned();
    move |why| QuantizeError::Write { path: path.clone(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_added_and_the_rest_is_kept() {
        let text = "{\n  \"eps\": 1e-05,\n  \"b\": {}\n}\n";
        let more = with_field(text, "q", &json!({ "x": 1 }));
        let want = "{\n  \"eps\": 1e-05,\n  \"b\": {},\n  \"q\": {\n    \"x\": 1\n  }\n}\n";
        assert_eq!(more, want);
        assert_eq!(with_field("{}", "q", &json!(1)), "{\n  \"q\": 1\n}\n");
        let null = with_field("{\"q\": null}", "q", &json!(1));
        let value: Value = serde_json::from_str(&null).expect("JSON");
        assert_eq!(value["q"], 1);
    }

    /// A kill before the commit leaves `.flashover-new`, one after it leaves `.flashover-done`.
    #[test]
    fn what_a_kill_leaves_in_an_empty_folder_is_no_content() {
        let parent = tempfile::tempdir().expect("temporary folder");
        let (model, output) = (parent.path().join("model"), parent.path().join("out"));
        let new = output.join(".flashover-new");
        for folder in [&model, &new] {
            fs::create_dir_all(folder).expect("writable");
        }
        fs::write(new.join("model.safetensors"), "half").expect("writable");
        let staged = Target::new(&model, &output).and_then(Target::begin).expect("still empty");
        assert!(fs::read_dir(staged.path()).expect("a folder").next().is_none());
        fs::write(staged.path().join("config.json"), "{}").expect("writable");
        drop(staged);
        assert!(fs::read_dir(&output).expect("a folder").next().is_none());

        let done = output.join(".flashover-done");
        fs::create_dir(&done).expect("writable");
        fs::write(done.join("config.json"), "{}").expect("writable");
        let refused = Target::new(&model, &output).err().expect("it is complete").to_string();
        assert!(refused.contains("is not empty"), "{refused}");
        assert_eq!(fs::read_to_string(output.join("config.json")).expect("moved"), "{}");
        assert!(!done.exists());
    }
}
