// The columns of a forward's metadata, one int32 row for every token: layout.py has their meanings.
#pragma once

namespace ygg {

enum Column { kToken, kPosition, kRow, kIndex, kPrefix, kRead, kPath };

}  // namespace ygg
