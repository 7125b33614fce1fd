// Templates of AOTInductor's runtime, for all graphs.
//
// The runtime reads the name of a device with a regular expression. Its templates take the compiler two
// fifths of the time of a graph's wrapper, so they are compiled here, once, and shims.py declares them to
// graphs. In another C++ library than GNU's they have other names; there every graph compiles its own.
#include <regex>
#include <string>

#ifdef __GLIBCXX__
template class std::basic_regex<char>;
template class std::__detail::_Compiler<std::regex_traits<char>>;
template class std::__detail::_NFA<std::regex_traits<char>>;
template class std::__detail::_Scanner<char>;
template bool std::regex_match(const std::string&, std::smatch&, const std::regex&,
                               std::regex_constants::match_flag_type);
#endif
