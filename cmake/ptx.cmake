# PTX as strings in the programs that load it. SPDX-License-Identifier: Apache-2.0

# gemini_embed_ptx(target file.ptx name): target gets a source that defines `const char name[]`, the text of file.ptx
# without the comments at its head (cmake/ptx.py says what they are). A change of the file runs CMake again.
function(gemini_embed_ptx target file name)
  cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  string(REGEX REPLACE "^(//[^\n]*\n)+" "" text "${text}")
  string(REPLACE "\\" "\\\\" text "${text}")
  string(REPLACE "\"" "\\\"" text "${text}")
  string(REPLACE "\n" "\\n\"\n  \"" text "${text}")
  # Beside the other sources of its folder, in the build tree.
  cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
  cmake_path(REPLACE_EXTENSION file LAST_ONLY .ptx.c OUTPUT_VARIABLE source)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${source})
  file(CONFIGURE OUTPUT ${source} CONTENT
    "/* Made by cmake/ptx.cmake. */\nextern const char @name@[];\nconst char @name@[] =\n  \"@text@\";\n" @ONLY)
  target_sources(${target} PRIVATE ${source})
endfunction()
