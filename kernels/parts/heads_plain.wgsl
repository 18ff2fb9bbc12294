// Part of attend_split: queries and the row's own key are rotated already.
fn turn_query(q: ptr<function, LaneDims>) {}
fn turn_key(k: ptr<function, LaneDims>) {}
