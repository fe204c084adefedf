//! Files of tensors: safetensors, NumPy's `.npy` and ONNX's `.pb`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Cursor;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use flashover::burn::tensor::{BoolStore, Bytes, DType, TensorData};
use flashover::onnx::{decode_tensor, encode_tensor};
use half::{bf16, f16};
use npyz::WriterBuilder;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

const HINT: &str = "use .npy, .pb or .safetensors";

fn kind(path: &Path) -> &str {
    path.extension().and_then(|own| own.to_str()).unwrap_or_default()
}

/// Reads tensors by name. A `.npy` has no name, and a `.pb` may have none.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<(Option<String>, TensorData)>> {
    let shown = path.display();
    let bytes = || {
        let meta = fs::metadata(path).with_context(|| format!("cannot read {shown}"))?;
        match meta.is_file() {
            true => fs::read(path).with_context(|| format!("cannot read {shown}")),
            false => bail!("{shown} is not a file\nhint: {HINT}"),
        }
    };
    match kind(path) {
        "npy" => {
            Ok(vec![(None, decode_npy(&bytes()?).with_context(|| format!("cannot read {shown}"))?)])
        }
        "pb" => {
            let (name, data) = decode_tensor(&bytes()?)?;
            Ok(vec![((!name.is_empty()).then_some(name), data)])
        }
        "safetensors" => {
            decode_safetensors(&bytes()?).with_context(|| format!("cannot read {shown}"))
        }
        _ => bail!("expected a file of tensors, got {shown}\nhint: {HINT}"),
    }
}

fn decode_npy(bytes: &[u8]) -> anyhow::Result<TensorData> {
    let file = npyz::NpyFile::new(Cursor::new(bytes))?;
    let shape: Vec<usize> = file.shape().iter().map(|own| *own as usize).collect();
    if file.order() == npyz::Order::Fortran && shape.len() > 1 {
        bail!("expected C order, got Fortran order\nhint: use numpy.ascontiguousarray");
    }
    let npyz::DType::Plain(own) = file.dtype() else {
        bail!("expected a plain dtype, got a structured one\nhint: write plain numbers");
    };
    macro_rules! elements {
        ($type:ty) => {
            TensorData::new(file.into_vec::<$type>()?, shape)
        };
    }
    use npyz::TypeChar as T;
    Ok(match (own.type_char(), own.size_field()) {
        (T::Float, 4) => elements!(f32),
        (T::Float, 8) => elements!(f64),
        (T::Float, 2) => elements!(f16),
        (T::Int, 1) => elements!(i8),
        (T::Int, 2) => elements!(i16),
        (T::Int, 4) => elements!(i32),
        (T::Int, 8) => elements!(i64),
        (T::Uint, 1) => elements!(u8),
        (T::Uint, 2) => elements!(u16),
        (T::Uint, 4) => elements!(u32),
        (T::Uint, 8) => elements!(u64),
        (T::Bool, _) => elements!(bool),
        _ => bail!("dtype {own} is not supported\nhint: cast the array"),
    })
}

fn decode_safetensors(bytes: &[u8]) -> anyhow::Result<Vec<(Option<String>, TensorData)>> {
    let file = SafeTensors::deserialize(bytes)?;
    let each = |(name, view): (String, TensorView<'_>)| {
        let dtype = match view.dtype() {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            Dtype::I64 => DType::I64,
            Dtype::I32 => DType::I32,
            Dtype::I16 => DType::I16,
            Dtype::I8 => DType::I8,
            Dtype::U64 => DType::U64,
            Dtype::U32 => DType::U32,
            Dtype::U16 => DType::U16,
            Dtype::U8 => DType::U8,
            Dtype::BOOL => DType::Bool(BoolStore::Native),
            other => bail!("dtype {other:?} of tensor `{name}` is not supported\nhint: cast it"),
        };
        let data = Bytes::from_bytes_vec(view.data().to_vec());
        Ok((Some(name), TensorData::from_bytes(data, view.shape().to_vec(), dtype)))
    };
    file.tensors().into_iter().map(each).collect()
}

/// Encodes tensors for a file with this name: one for `.npy` and `.pb`, any number for safetensors.
pub(crate) fn encode(
    path: &Path,
    tensors: &BTreeMap<String, TensorData>,
) -> anyhow::Result<Vec<u8>> {
    let one = || match tensors.iter().next() {
        Some(own) if tensors.len() == 1 => Ok(own),
        _ => bail!(
            "{} holds one tensor, but the graph has {} outputs\nhint: write .safetensors",
            path.display(),
            tensors.len()
        ),
    };
    match kind(path) {
        "npy" => encode_npy(one()?.1),
        "pb" => {
            let (name, data) = one()?;
            Ok(encode_tensor(name, data)?)
        }
        "safetensors" => encode_safetensors(tensors),
        _ => bail!("expected a file of tensors, got {}\nhint: {HINT}", path.display()),
    }
}

fn encode_npy(data: &TensorData) -> anyhow::Result<Vec<u8>> {
    let shape: Vec<u64> = data.shape().iter().map(|own| *own as u64).collect();
    let mut bytes = Vec::new();
    macro_rules! write {
        ($type:ty) => {{
            let options = npyz::WriteOptions::<$type>::new().default_dtype().shape(&shape);
            let mut writer = options.writer(&mut bytes).begin_nd()?;
            writer.extend(data.iter::<$type>())?;
            writer.finish()?;
        }};
    }
    match data.dtype() {
        DType::F64 => write!(f64),
        DType::F16 => write!(f16),
        // NumPy has no bf16.
        DType::F32 | DType::BF16 => write!(f32),
        DType::I64 => write!(i64),
        DType::I32 => write!(i32),
        DType::I16 => write!(i16),
        DType::I8 => write!(i8),
        DType::U64 => write!(u64),
        DType::U32 => write!(u32),
        DType::U16 => write!(u16),
        DType::U8 => write!(u8),
        DType::Bool(_) => write!(bool),
        other => bail!("dtype {other:?} cannot be written as .npy\nhint: write .safetensors"),
    }
    Ok(bytes)
}

fn encode_safetensors(tensors: &BTreeMap<String, TensorData>) -> anyhow::Result<Vec<u8>> {
    let each = |(name, data): (&'_ String, &'_ TensorData)| {
        let dtype = match data.dtype() {
            DType::F64 => Dtype::F64,
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::I64 => Dtype::I64,
            DType::I32 => Dtype::I32,
            DType::I16 => Dtype::I16,
            DType::I8 => Dtype::I8,
            DType::U64 => Dtype::U64,
            DType::U32 => Dtype::U32,
            DType::U16 => Dtype::U16,
            DType::U8 => Dtype::U8,
            DType::Bool(_) => Dtype::BOOL,
            other => return Err(anyhow!("dtype {other:?} cannot be written as .safetensors")),
        };
        Ok((name.clone(), dtype, data.shape().to_vec()))
    };
    let known = tensors.iter().map(each).collect::<anyhow::Result<Vec<_>>>()?;
    let views = known.into_iter().zip(tensors.values());
    let views = views
        .map(|((name, dtype, shape), data)| {
            Ok((name, TensorView::new(dtype, shape, data.as_bytes())?))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok(safetensors::serialize(views, None)?)
}

/// Converts floats to the dtype of an input. Other data stay as they are.
pub(super) fn converted(data: TensorData, want: DType) -> TensorData {
    let float = |own: DType| matches!(own, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    match float(data.dtype()) && float(want) && data.dtype() != want {
        true => match want {
            DType::F16 => data.convert::<f16>(),
            DType::BF16 => data.convert::<bf16>(),
            _ => data.convert_dtype(want),
        },
        false => data,
    }
}
