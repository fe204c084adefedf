//! Ops by name, with settings as text, for the command line.

use std::collections::BTreeMap;
use std::str::FromStr;

use kernels::attention::{AttentionOptions, Implementation};
use kernels::matmul::Layout;
use tune::Policy;

use super::attention::{Attended, AttentionGradients, attention, attention_backward};
use super::conv::{ConvSettings, conv};
use super::error::HostOpError;
use super::matmul::{MatmulOptions, matmul};
use super::tensor::HostTensor;

use crate::device::Device;

/// Runs the op `name` on named inputs. Settings are `key=value` pairs, each at most once.
///
/// - `matmul` takes `lhs`, `rhs` and optionally `bias`, and returns `out`. Settings: `lhs=row|col`, `rhs=row|col`,
///   `tf32=true|false`.
/// - `conv` takes `x`, `weight` and optionally `bias`, and returns `out`. Settings: `stride=2` or `2,1`, `padding=1`, `1,2`
///   (height, width) or `1,1,0,2` (top, bottom, left, right), `dilation=2` or `2,1`, `groups=4`, `transposed=true|false`,
///   `tf32=true|false`.
/// - `attention` takes `q`, `k`, `v` and optionally `bias` and `dout`, and returns `out` and `lse`. Settings:
///   `causal=true|false`, `window=KEYS`, `scale=NUMBER`, `softcap=NUMBER`, `implementation=flash|plain`.
///
/// With `dout`, the gradient of the result, `attention` also returns `dq`, `dk` and `dv`. Shapes are those of
/// [`matmul`], [`conv`] and [`attention`].
///
/// # Errors
/// See [`HostOpError`].
pub fn run_op(
    name: &str,
    device: &Device,
    inputs: &BTreeMap<String, HostTensor>,
    settings: &[(String, String)],
    policy: Policy,
) -> Result<BTreeMap<String, HostTensor>, HostOpError> {
    let (known, text): (&[&str], _) = match name {
        "matmul" => (&["lhs", "rhs", "bias"], "lhs, rhs and optionally bias"),
        "conv" => (&["x", "weight", "bias"], "x, weight and optionally bias"),
        "attention" => (&["q", "k", "v", "bias", "dout"], "q, k, v and optionally bias and dout"),
        _ => return Err(HostOpError::UnknownOp(name.to_owned())),
    };
    if let Some(extra) = inputs.keys().find(|k| !known.contains(&k.as_str())) {
        return Err(HostOpError::UnusedInput(extra.clone(), text));
    }
    for (i, (key, _)) in settings.iter().enumerate() {
        if settings[..i].iter().any(|(before, _)| before == key) {
            return Err(HostOpError::SettingTwice(key.clone()));
        }
    }
    let get = |name: &'static str| inputs.get(name).ok_or(HostOpError::MissingInput(name, text));
    let bias = inputs.get("bias");
    if name == "matmul" {
        let options = matmul_options(settings)?;
        let out = matmul(device, get("lhs")?, get("rhs")?, bias, &options, policy)?;
        return Ok(BTreeMap::from([("out".to_owned(), out)]));
    }
    if name == "conv" {
        let settings = conv_settings(settings)?;
        let out = conv(device, get("x")?, get("weight")?, bias, &settings, policy)?;
        return Ok(BTreeMap::from([("out".to_owned(), out)]));
    }
    let options = attention_options(settings)?;
    let operands = [get("q")?, get("k")?, get("v")?];
    let named = |all: Vec<(&str, HostTensor)>| {
        all.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect()
    };
    let Some(dout) = inputs.get("dout") else {
        let Attended { out, lse } = attention(device, operands, bias, &options, policy)?;
        return Ok(named(vec![("out", out), ("lse", lse)]));
    };
    let (Attended { out, lse }, AttentionGradients { dq, dk, dv }) =
        attention_backward(device, operands, bias, dout, &options, policy)?;
    Ok(named(vec![("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)]))
}

fn attention_options(settings: &[(String, String)]) -> Result<AttentionOptions, HostOpError> {
    let mut options = AttentionOptions::default();
    for (key, value) in settings {
        let unknown = || HostOpError::UnknownSetting {
            op: "attention",
            key: key.clone(),
            value: value.clone(),
            known: "causal=true|false, window=KEYS, scale=NUMBER, softcap=NUMBER, \
                    implementation=flash|plain",
        };
        let number = || match value.parse() {
            Ok(number) if f32::is_finite(number) => Ok(number),
            _ => Err(bad_value(key, value, "a finite number, such as 0.125")),
        };
        match key.as_str() {
            "causal" => options.causal = truth(key, value)?,
            "window" => {
                let keys = value.parse().ok().filter(|keys| *keys > 0);
                let takes = "a whole number of keys from 1 to 4294967295";
                options.window = Some(keys.ok_or_else(|| bad_value(key, value, takes))?);
            }
            "scale" => options.scale = Some(number()?),
            "softcap" => options.softcap = Some(number()?),
            "implementation" => {
                options.implementation = Some(match value.as_str() {
                    "flash" => Implementation::Flash,
                    "plain" => Implementation::Plain,
                    _ => return Err(bad_value(key, value, "flash or plain")),
                });
            }
            _ => return Err(unknown()),
        }
    }
    Ok(options)
}

fn conv_settings(settings: &[(String, String)]) -> Result<ConvSettings, HostOpError> {
    let mut options = ConvSettings::default();
    for (key, value) in settings {
        let pair = || match numbers::<usize>(value)[..] {
            [both] if both > 0 => Ok([both; 2]),
            [height, width] if height > 0 && width > 0 => Ok([height, width]),
            _ => Err(bad_value(key, value, "a number from 1, or two: height,width")),
        };
        match key.as_str() {
            "stride" => options.stride = pair()?,
            "dilation" => options.dilation = pair()?,
            "groups" => {
                let groups = value.parse().ok().filter(|groups| *groups > 0);
                options.groups =
                    groups.ok_or_else(|| bad_value(key, value, "a whole number from 1"))?;
            }
            "padding" => {
                options.padding = match numbers::<i32>(value)[..] {
                    [all] => [[all; 2]; 2],
                    [height, width] => [[height; 2], [width; 2]],
                    [top, bottom, left, right] => [[top, bottom], [left, right]],
                    _ => {
                        let takes =
                            "one number, two (height,width) or four (top,bottom,left,right)";
                        return Err(bad_value(key, value, takes));
                    }
                }
            }
            "transposed" => options.transposed = truth(key, value)?,
            "tf32" => options.tf32 = truth(key, value)?,
            _ => {
                return Err(HostOpError::UnknownSetting {
                    op: "conv",
                    key: key.clone(),
                    value: value.clone(),
                    known: "stride=N, padding=N, dilation=N, groups=N, transposed=true|false, \
                            tf32=true|false",
                });
            }
        }
    }
    Ok(options)
}

/// Returns the numbers of a list with commas; nothing if one is no number.
fn numbers<T: FromStr>(list: &str) -> Vec<T> {
    let numbers: Result<Vec<T>, _> = list.split(',').map(str::parse).collect();
    numbers.unwrap_or_default()
}

fn matmul_options(settings: &[(String, String)]) -> Result<MatmulOptions, HostOpError> {
    let mut options = MatmulOptions::default();
    for (key, value) in settings {
        let unknown = || HostOpError::UnknownSetting {
            op: "matmul",
            key: key.clone(),
            value: value.clone(),
            known: "lhs=row|col, rhs=row|col, tf32=true|false",
        };
        let layout = || match value.as_str() {
            "row" => Ok(Layout::Row),
            "col" => Ok(Layout::Col),
            _ => Err(bad_value(key, value, "row or col")),
        };
        match key.as_str() {
            "lhs" => options.lhs = layout()?,
            "rhs" => options.rhs = layout()?,
            "tf32" => options.tf32 = truth(key, value)?,
            _ => return Err(unknown()),
        }
    }
    Ok(options)
}

fn truth(key: &str, value: &str) -> Result<bool, HostOpError> {
    value.parse().map_err(|_| bad_value(key, value, "true or false"))
}

fn bad_value(key: &str, value: &str, takes: &'static str) -> HostOpError {
    HostOpError::SettingValue { key: key.to_owned(), value: value.to_owned(), takes }
}
