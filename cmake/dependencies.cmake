# Everything the build needs from outside; scripts/setup.sh installs it on Debian and Ubuntu.

find_package(OpenMP REQUIRED)
find_package(fmt REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(hwy REQUIRED)

# Matrix products: oneDNN, or OpenBLAS on a machine that lacks it.
add_library(furious_matmul INTERFACE)
find_package(dnnl CONFIG QUIET)
if(dnnl_FOUND)
  message(STATUS "matrix products: oneDNN ${dnnl_VERSION}")
  target_link_libraries(furious_matmul INTERFACE DNNL::dnnl)
  target_compile_definitions(furious_matmul INTERFACE FURIOUS_ONEDNN)
else()
  set(BLA_VENDOR OpenBLAS)
  find_package(BLAS REQUIRED)
  find_path(CBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas REQUIRED)
  message(STATUS "matrix products: OpenBLAS (oneDNN was not found)")
  target_link_libraries(furious_matmul INTERFACE BLAS::BLAS)
  target_include_directories(furious_matmul INTERFACE ${CBLAS_INCLUDE_DIR})
endif()
