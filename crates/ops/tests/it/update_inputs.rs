use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use ops::{OpError, captures, update_inputs};

#[test]
fn every_clone_sees_new_words() {
    let device = Device::cpu();
    let data = TensorData::new(vec![1i32, 2, 3, 4, 5, 6], [3, 2]);
    let tensor = Tensor::<2, Int>::from_data(data, (&device, DType::I32));
    let (clone, before) = (tensor.clone(), tensor.clone() * 10);
    update_inputs(&tensor, &[7, 8, 9, 10, 11, u32::MAX]).expect("six words");
    let values = |t: Tensor<2, Int>| t.into_data().try_to_vec::<i32>().expect("I32");
    assert_eq!(values(clone), [7, 8, 9, 10, 11, -1]);
    assert_eq!(values(before), [10, 20, 30, 40, 50, 60]);
    assert!(matches!(update_inputs(&tensor, &[1, 2]), Err(OpError::Shape { .. })));
    let wide = tensor.cast(DType::I64);
    assert!(matches!(update_inputs(&wide, &[1; 6]), Err(OpError::DType { .. })));
    assert!(!captures(&device), "the CPU runtime has no graphs");
}
