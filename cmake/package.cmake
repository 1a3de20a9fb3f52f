# Files of `cmake --install`: the binary, libfurious.so, its headers, a CMake package for find_package(furious), a
# pkg-config file, the license and the examples. The library is shared, so that its users need none of the packages it was
# built with.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

file(GLOB public_headers CONFIGURE_DEPENDS include/furious/*.h)
add_library(libfurious SHARED)
target_sources(libfurious PUBLIC FILE_SET HEADERS BASE_DIRS include FILES ${public_headers})
target_link_libraries(libfurious PRIVATE furious_objects furious_options)
# Symbols of static libraries are hidden; the library is never unloaded, since the threads of its pool run on.
target_link_options(libfurious PRIVATE -Wl,--exclude-libs,ALL -Wl,-z,nodelete)
target_compile_features(libfurious INTERFACE cxx_std_20)
# Before 1.0 a minor version may change the interface.
set_target_properties(libfurious PROPERTIES OUTPUT_NAME furious EXPORT_NAME furious VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} VERIFY_INTERFACE_HEADER_SETS ON)
# Dependencies from outside the system's folders are found where the build found them.
set_target_properties(libfurious furious PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)

install(TARGETS furious)
install(TARGETS libfurious EXPORT furious FILE_SET HEADERS)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/furious)
install(EXPORT furious FILE furiousConfig.cmake NAMESPACE furious:: DESTINATION ${package_folder})
write_basic_package_version_file(furiousConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/furiousConfigVersion.cmake DESTINATION ${package_folder})

# The prefix is found relative to the file, so that an installed tree may be moved.
set(pkgconfig_folder ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH prefix_from_pkgconfig /prefix/${pkgconfig_folder} /prefix)
configure_file(cmake/furious.pc.in furious.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/furious.pc DESTINATION ${pkgconfig_folder})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY examples DESTINATION ${CMAKE_INSTALL_DOCDIR})
