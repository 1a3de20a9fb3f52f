# Everything the build needs from outside; scripts/setup.sh installs it on Debian and Ubuntu.

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(hwy REQUIRED)
find_package(Boost 1.74 REQUIRED)  # Beast and Asio, headers alone: the HTTP server

# Matrix products: oneDNN, or OpenBLAS on a machine that lacks it.
option(FURIOUS_ONEDNN "Use oneDNN for matrix products where it is found; OFF uses OpenBLAS" ON)
add_library(furious_matmul INTERFACE)
if(FURIOUS_ONEDNN)
  find_package(dnnl CONFIG QUIET)
endif()
if(FURIOUS_ONEDNN AND dnnl_FOUND)
  message(STATUS "matrix products: oneDNN ${dnnl_VERSION}")
  find_package(OpenMP REQUIRED)  # only to tell oneDNN that it has one thread
  target_link_libraries(furious_matmul INTERFACE DNNL::dnnl OpenMP::OpenMP_CXX)
  target_compile_definitions(furious_matmul INTERFACE FURIOUS_ONEDNN)
else()
  set(BLA_VENDOR OpenBLAS)
  find_package(BLAS REQUIRED)
  find_path(CBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas REQUIRED)
  message(STATUS "matrix products: OpenBLAS")
  target_link_libraries(furious_matmul INTERFACE BLAS::BLAS)
  target_include_directories(furious_matmul INTERFACE ${CBLAS_INCLUDE_DIR})
endif()

# Text: tokenizers and compressed corpora.
find_package(PkgConfig REQUIRED)
find_package(ZLIB REQUIRED)
pkg_check_modules(sentencepiece REQUIRED IMPORTED_TARGET sentencepiece)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)  # of tokenizer.json
pkg_check_modules(utf8proc REQUIRED libutf8proc)  # its compile flags are for Windows
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET libzstd)
add_library(furious_text INTERFACE)
target_link_libraries(furious_text INTERFACE PkgConfig::sentencepiece PkgConfig::pcre2 ${utf8proc_LINK_LIBRARIES}
                      PkgConfig::zstd ZLIB::ZLIB)
target_include_directories(furious_text INTERFACE ${utf8proc_INCLUDE_DIRS})

# Parquet input, where Apache Arrow is found (https://arrow.apache.org/install). Everything else works without it.
find_package(Parquet CONFIG QUIET)
if(Parquet_FOUND)
  message(STATUS "parquet: Arrow ${Parquet_VERSION}")
  target_link_libraries(furious_text INTERFACE Parquet::parquet_shared)
  target_compile_definitions(furious_text INTERFACE FURIOUS_PARQUET)
else()
  message(STATUS "parquet: not built in, Apache Arrow was not found")
endif()

# Several processes, where MPI is found. Everything else works without it.
option(FURIOUS_MPI "Train with several processes, where MPI is found" ON)
if(FURIOUS_MPI)
  set(MPI_CXX_SKIP_MPICXX ON)  # the C interface serves
  find_package(MPI COMPONENTS CXX QUIET)
endif()
if(MPI_CXX_FOUND)
  message(STATUS "several processes: MPI ${MPI_CXX_VERSION}")
else()
  message(STATUS "several processes: not built in, MPI was not found")
endif()

# Editing of lines in `furious chat`, where libedit is found. Without it lines are read as they come.
pkg_check_modules(libedit IMPORTED_TARGET libedit)
add_library(furious_edit INTERFACE)
if(libedit_FOUND)
  target_link_libraries(furious_edit INTERFACE PkgConfig::libedit)
  target_compile_definitions(furious_edit INTERFACE FURIOUS_EDIT)
else()
  message(STATUS "line editing: not built in, libedit was not found")
endif()
