// A 16 x 16 matrix of four, for adapters whose matrices are 8 x 8 x 8.
// What is written for TILE is repeated for each array that the kernel loads from or stores to, with EIGHT elements for eight f16:
// see shaders.split_matrices.
alias Left8 = subgroup_matrix_left<f16, 8, 8>;
alias Right8 = subgroup_matrix_right<f16, 8, 8>;
alias Result8 = subgroup_matrix_result<f32, 8, 8>;
struct Left { a00: Left8, a01: Left8, a10: Left8, a11: Left8 }
struct Right { b00: Right8, b01: Right8, b10: Right8, b11: Right8 }
struct Result { c00: Result8, c01: Result8, c10: Result8, c11: Result8 }

fn multiply_add(a: Left, b: Right, c: Result) -> Result {
  let c00 = subgroupMatrixMultiplyAccumulate(a.a00, b.b00, c.c00);
  let c01 = subgroupMatrixMultiplyAccumulate(a.a00, b.b01, c.c01);
  let c10 = subgroupMatrixMultiplyAccumulate(a.a10, b.b00, c.c10);
  let c11 = subgroupMatrixMultiplyAccumulate(a.a10, b.b01, c.c11);
  return Result(subgroupMatrixMultiplyAccumulate(a.a01, b.b10, c00), subgroupMatrixMultiplyAccumulate(a.a01, b.b11, c01),
                subgroupMatrixMultiplyAccumulate(a.a11, b.b10, c10), subgroupMatrixMultiplyAccumulate(a.a11, b.b11, c11));
}

fn load_Left_row_major_TILE(at: u32, pitch: u32) -> Left {
  let down = at + 8u * pitch;
  return Left(subgroupMatrixLoad<Left8, row_major>(&TILE, at, pitch), subgroupMatrixLoad<Left8, row_major>(&TILE, at + EIGHT, pitch),
              subgroupMatrixLoad<Left8, row_major>(&TILE, down, pitch), subgroupMatrixLoad<Left8, row_major>(&TILE, down + EIGHT, pitch));
}
fn load_Right_row_major_TILE(at: u32, pitch: u32) -> Right {
  let down = at + 8u * pitch;
  return Right(subgroupMatrixLoad<Right8, row_major>(&TILE, at, pitch), subgroupMatrixLoad<Right8, row_major>(&TILE, at + EIGHT, pitch),
               subgroupMatrixLoad<Right8, row_major>(&TILE, down, pitch), subgroupMatrixLoad<Right8, row_major>(&TILE, down + EIGHT, pitch));
}
fn load_Right_col_major_TILE(at: u32, pitch: u32) -> Right {
  let right = at + 8u * pitch;
  return Right(subgroupMatrixLoad<Right8, col_major>(&TILE, at, pitch), subgroupMatrixLoad<Right8, col_major>(&TILE, right, pitch),
               subgroupMatrixLoad<Right8, col_major>(&TILE, at + EIGHT, pitch), subgroupMatrixLoad<Right8, col_major>(&TILE, right + EIGHT, pitch));
}

fn load_Result_row_major_TILE(at: u32, pitch: u32) -> Result {
  let down = at + 8u * pitch;
  return Result(subgroupMatrixLoad<Result8, row_major>(&TILE, at, pitch), subgroupMatrixLoad<Result8, row_major>(&TILE, at + 2u, pitch),
                subgroupMatrixLoad<Result8, row_major>(&TILE, down, pitch), subgroupMatrixLoad<Result8, row_major>(&TILE, down + 2u, pitch));
}
fn store_row_major_TILE(at: u32, c: Result, pitch: u32) {
  let down = at + 8u * pitch;
  subgroupMatrixStore<row_major>(&TILE, at, c.c00, pitch); subgroupMatrixStore<row_major>(&TILE, at + 2u, c.c01, pitch);
  subgroupMatrixStore<row_major>(&TILE, down, c.c10, pitch); subgroupMatrixStore<row_major>(&TILE, down + 2u, c.c11, pitch);
}
