//! Addresses of device buffers, in builds with CUDA.

#[cfg(feature = "cuda")]
mod own {
    use cubecl::cuda::CudaRuntime;
    use cubecl::server::{Handle, ServerStorage};
    use cubecl_runtime::runtime::Runtime;
    use cubecl_runtime::storage::{ComputeStorage, ManagedResource};

    use crate::Device;
    use crate::transfer::{TransferError, failed};

    type Server = <CudaRuntime as Runtime>::Server;

    /// A device buffer, which stays where it is while this value lives.
    pub(in crate::transfer) struct Resource(
        ManagedResource<<<Server as ServerStorage>::Storage as ComputeStorage>::Resource>,
    );

    impl Resource {
        pub(in crate::transfer) fn new(
            device: &Device,
            handle: &Handle,
        ) -> Result<Self, TransferError> {
            let resource = device.client().get_resource::<Server>(handle.clone());
            resource.map(Self).map_err(failed)
        }

        /// Returns the address on the device.
        pub(in crate::transfer) fn address(&self) -> u64 {
            self.0.resource().ptr
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod own {
    use cubecl::server::Handle;

    use crate::Device;
    use crate::transfer::{TransferError, failed};

    /// No buffer: a build without CUDA opens no CUDA device.
    pub(in crate::transfer) enum Resource {}

    impl Resource {
        pub(in crate::transfer) fn new(_: &Device, _: &Handle) -> Result<Self, TransferError> {
            Err(failed("this build has no CUDA"))
        }

        pub(in crate::transfer) const fn address(&self) -> u64 {
            match *self {}
        }
    }
}

pub(super) use own::Resource;
