// Role split_count: the number of splits into which attend_split has cut the context, as a constant.
const SPLITS: u32 = 2u;
fn split_count() -> u32 { return SPLITS; }
