//! Machine code put into CubeCL's store of compiled kernels.
//!
//! CubeCL compiles a kernel when it is first launched, on the one thread that serves the device: a tuner with a dozen
//! candidates waits for a dozen compilations in a row. [`compile`] runs NVRTC on every core and fills the store in which
//! CubeCL looks first (`[compilation] cache`, which `arch` turns on). CubeCL compiles what the store lacks.

use std::ffi::c_char;

use arch::{Backend, Device};
use cubecl::cuda::install;
use cubecl::prelude::{CubeKernel, KernelId};
use cubecl_server::compiler::{KernelCacheKey, build_id_hash, compilation_store, store_compiled};
use cubecl_server::kernel::BufferIOAttr;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::nvrtc::{self, CompileError, Output};
use crate::source::expand;

/// A compiled kernel in CubeCL's store: the fields of its private `PtxCacheEntry`, in the same order. `ptx` is anything
/// that the driver's loader takes, here machine code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    entrypoint_name: String,
    shared_mem_bytes: usize,
    ptx: Vec<c_char>,
    #[serde(default)]
    io: Option<Vec<BufferIOAttr>>,
}

/// Compiles the kernels of launches 0 to `count` on `device`, except those that the store holds. A kernel that fails is
/// left to its launch, which reports why. Does nothing on back ends other than CUDA.
pub fn compile(
    device: &Device,
    count: usize,
    kernels: impl Fn(usize) -> Vec<Box<dyn CubeKernel>> + Sync,
) {
    let (Backend::Cuda, Some(sm)) = (device.backend(), device.profile().compute_capability) else {
        return;
    };
    let store = compilation_store::<KernelCacheKey, Entry>("cuda", format!("ptx_sm{sm}-cpp"));
    let Some(mut store) = store else { return };
    let key = |id: &KernelId| KernelCacheKey::new(id, build_id_hash());
    let mut missing = Vec::new();
    for i in 0..count {
        for (j, kernel) in kernels(i).iter().enumerate() {
            if store.get_mut(&key(&kernel.id())).is_none() {
                missing.push((i, j));
            }
        }
    }
    let compiled: Vec<_> = missing
        .into_par_iter()
        .filter_map(|(i, j)| {
            let kernel = kernels(i).swap_remove(j);
            match machine_code(kernel.as_ref(), sm) {
                Ok(entry) => Some((key(&kernel.id()), entry)),
                Err(e) => {
                    log::info!("not precompiled: {}: {e}", kernel.name());
                    None
                }
            }
        })
        .collect();
    for (key, entry) in compiled {
        store_compiled(&mut store, key, entry);
    }
}

fn machine_code(kernel: &dyn CubeKernel, sm: u32) -> Result<Entry, CompileError> {
    let source = expand(kernel, sm)?.source()?;
    let include = [install::include_path(), install::cccl_include_path()];
    Ok(Entry {
        ptx: nvrtc::compile(&source.text, sm, &include, Output::Cubin)?,
        entrypoint_name: source.entry,
        shared_mem_bytes: source.shared_bytes,
        io: source.io,
    })
}
