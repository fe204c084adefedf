//! Machine code put into CubeCL's store of compiled kernels.
//!
//! CubeCL compiles a kernel when it is first launched, on the one thread that serves the device: a tuner with a dozen
//! candidates waits for a dozen compilations in a row. [`compile`] runs NVRTC on many cores and fills the store in which
//! CubeCL looks first (`[compilation] cache`, which `arch` turns on). CubeCL compiles what the store lacks.

use std::collections::HashSet;
use std::ffi::c_char;

use arch::{Backend, Device};
use cubecl::cuda::install;
use cubecl::prelude::{CubeKernel, KernelId};
use cubecl_environment::persistence::Store;
use cubecl_server::compiler::{KernelCacheKey, build_id_hash, compilation_store, store_compiled};
use cubecl_server::kernel::BufferIOAttr;
use rayon::ThreadPoolBuilder;
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

/// Kernels of launches that the store lacks: `(launch, kernel of the launch)`, each kernel once.
#[derive(Debug, Default)]
pub struct Missing(Vec<(usize, usize)>);

impl Missing {
    /// Looks up the kernels of launches 0 to `count` on `device`. None is missing on back ends other than CUDA.
    pub fn of(
        device: &Device,
        count: usize,
        kernels: impl Fn(usize) -> Vec<Box<dyn CubeKernel>>,
    ) -> Self {
        let Some((_, mut store)) = store(device) else { return Self::default() };
        let (mut missing, mut seen) = (Vec::new(), HashSet::new());
        for i in 0..count {
            for (j, kernel) in kernels(i).iter().enumerate() {
                let id = kernel.id();
                if seen.insert(id.clone()) && store.get_mut(&key(&id)).is_none() {
                    missing.push((i, j));
                }
            }
        }
        Self(missing)
    }

    /// Number of kernels.
    pub const fn count(&self) -> usize {
        self.0.len()
    }

    /// Compiles them on half of the cores, and on two at least, and puts them into the store. A kernel that fails is left to
    /// its launch, which reports why.
    ///
    /// With the 17 kernels of a model of 1B in bf16, which is loaded meanwhile, the first token comes after 2.5 s with 8
    /// threads, 2.8 s with 4, and 2.8 to 3.0 s with 16, on 16 cores of an H100's host: more threads slow each other down.
    pub fn compile(
        self,
        device: &Device,
        kernels: impl Fn(usize) -> Vec<Box<dyn CubeKernel>> + Sync,
    ) {
        let Some((sm, mut store)) = store(device) else { return };
        let one = |(i, j): (usize, usize)| {
            let kernel = kernels(i).swap_remove(j);
            match machine_code(kernel.as_ref(), sm) {
                Ok(entry) => Some((key(&kernel.id()), entry)),
                Err(e) => {
                    log::info!("not precompiled: {}: {e}", kernel.name());
                    None
                }
            }
        };
        let threads = (rayon::current_num_threads() / 2).max(2);
        let compiled: Vec<_> = match ThreadPoolBuilder::new().num_threads(threads).build() {
            Ok(pool) => pool.install(|| self.0.into_par_iter().filter_map(one).collect()),
            Err(e) => {
                log::info!("not precompiled: {e}");
                return;
            }
        };
        for (key, entry) in compiled {
            store_compiled(&mut store, key, entry);
        }
    }
}

/// Compiles the kernels of launches 0 to `count` on `device`, except those that the store holds.
pub fn compile(
    device: &Device,
    count: usize,
    kernels: impl Fn(usize) -> Vec<Box<dyn CubeKernel>> + Sync,
) {
    Missing::of(device, count, &kernels).compile(device, kernels);
}

/// The capability of a CUDA device, and the store of its kernels.
fn store(device: &Device) -> Option<(u32, Store<KernelCacheKey, Entry>)> {
    let sm = device.profile().compute_capability.filter(|_| device.backend() == Backend::Cuda)?;
    Some((sm, compilation_store("cuda", format!("ptx_sm{sm}-cpp"))?))
}

fn key(id: &KernelId) -> KernelCacheKey {
    KernelCacheKey::new(id, build_id_hash())
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
