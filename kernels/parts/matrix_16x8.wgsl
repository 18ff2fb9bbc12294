// A 16 x 16 matrix of two, for adapters whose matrices are 16 x 8 x 16 (left 16 x 16, right and result 16 x 8).
// What is written for TILE is repeated for each array that the kernel loads from or stores to, with EIGHT elements for eight f16:
// see shaders.split_matrices.
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right8 = subgroup_matrix_right<f16, 8, 16>;
alias Result8 = subgroup_matrix_result<f32, 8, 16>;
struct Right { a: Right8, b: Right8 }
struct Result { a: Result8, b: Result8 }

fn multiply_add(a: Left, b: Right, c: Result) -> Result {
  return Result(subgroupMatrixMultiplyAccumulate(a, b.a, c.a), subgroupMatrixMultiplyAccumulate(a, b.b, c.b));
}

fn load_Left_row_major_TILE(at: u32, pitch: u32) -> Left { return subgroupMatrixLoad<Left, row_major>(&TILE, at, pitch); }
fn load_Right_row_major_TILE(at: u32, pitch: u32) -> Right {
  return Right(subgroupMatrixLoad<Right8, row_major>(&TILE, at, pitch), subgroupMatrixLoad<Right8, row_major>(&TILE, at + EIGHT, pitch));
}
fn load_Right_col_major_TILE(at: u32, pitch: u32) -> Right {
  let next = at + 8u * pitch;
  return Right(subgroupMatrixLoad<Right8, col_major>(&TILE, at, pitch), subgroupMatrixLoad<Right8, col_major>(&TILE, next, pitch));
}

fn load_Result_row_major_TILE(at: u32, pitch: u32) -> Result {
  return Result(subgroupMatrixLoad<Result8, row_major>(&TILE, at, pitch), subgroupMatrixLoad<Result8, row_major>(&TILE, at + 2u, pitch));
}
fn store_row_major_TILE(at: u32, c: Result, pitch: u32) {
  subgroupMatrixStore<row_major>(&TILE, at, c.a, pitch);
  subgroupMatrixStore<row_major>(&TILE, at + 2u, c.b, pitch);
}
