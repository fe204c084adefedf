//! Fills CubeCL's store of compiled kernels.
//!
//! CubeCL compiles a kernel at its first launch, on the single thread of the device. A tuner with a dozen candidates
//! would wait for a dozen compilations in a row. [`compile`] runs NVRTC on many cores and fills the store that CubeCL
//! checks first (`[compilation] cache`, enabled by `arch`). CubeCL compiles the kernels that the store lacks.

use std::collections::HashSet;
use std::ffi::c_char;

use arch::{Backend, Device};
use cubecl::prelude::{CubeKernel, KernelId};
use cubecl_environment::persistence::Store;
use cubecl_server::compiler::{KernelCacheKey, build_id_hash, compilation_store, store_compiled};
use cubecl_server::kernel::BufferIOAttr;
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::nvrtc::{self, CompileError, Output};
use crate::properties::headers;
use crate::source::expand;

/// A compiled kernel in CubeCL's store, with the fields of CubeCL's private `PtxCacheEntry` in the same order. `ptx`
/// may be anything that the driver can load, here machine code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    entrypoint_name: String,
    shared_mem_bytes: usize,
    ptx: Vec<c_char>,
    #[serde(default)]
    io: Option<Vec<BufferIOAttr>>,
}

/// Kernels that the store lacks, as `(launch, kernel of the launch)`, without duplicates.
#[derive(Debug, Default)]
pub struct Missing(Vec<(usize, usize)>);

impl Missing {
    /// Finds the missing kernels of launches `0..count` on `device`; empty on backends other than CUDA.
    pub fn find(
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

    /// Returns the number of missing kernels.
    pub const fn count(&self) -> usize {
        self.0.len()
    }

    /// Compiles the missing kernels and puts them into the store. If a kernel fails, its launch reports the error.
    ///
    /// Uses half of the cores, at least two: more threads slow each other down. Measured with the 17 kernels of a 1B
    /// model in bf16 that loads at the same time, on 16 cores of an H100's host. The first token came after 2.5 s with
    /// 8 threads, 2.8 s with 4, and 2.8 to 3.0 s with 16.
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

/// Compiles the kernels of launches `0..count` on `device` that the store lacks.
pub fn compile(
    device: &Device,
    count: usize,
    kernels: impl Fn(usize) -> Vec<Box<dyn CubeKernel>> + Sync,
) {
    Missing::find(device, count, &kernels).compile(device, kernels);
}

/// Returns the compute capability and the kernel store of a CUDA device; `None` on other backends.
fn store(device: &Device) -> Option<(u32, Store<KernelCacheKey, Entry>)> {
    let sm = device.profile().compute_capability.filter(|_| device.backend() == Backend::Cuda)?;
    Some((sm, compilation_store("cuda", format!("ptx_sm{sm}-cpp"))?))
}

fn key(id: &KernelId) -> KernelCacheKey {
    KernelCacheKey::new(id, build_id_hash())
}

fn machine_code(kernel: &dyn CubeKernel, sm: u32) -> Result<Entry, CompileError> {
    let source = expand(kernel, sm)?.source()?;
    Ok(Entry {
        ptx: nvrtc::compile(&source.text, sm, &headers(), Output::Cubin)?,
        entrypoint_name: source.entry,
        shared_mem_bytes: source.shared_bytes,
        io: source.io,
    })
}
